"""GPUs: which one a rank has (places), whose arrays are on it (values), its streams (device), its kernels (kernels)."""
