"""horovod.mxnet: raises ImportError; allred supports PyTorch only."""

from allred.compat import horovod_path

raise ImportError(horovod_path.unavailable(__name__), name=__name__)
