"""What keeps a job from hanging or lying: the watcher process of a node, and how a rank leaves."""
