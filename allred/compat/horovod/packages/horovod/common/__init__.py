"""The names of horovod.common that programs import, from allred."""
