"""What keeps a job from hanging or lying. So far: how a rank leaves (exit)."""
