"""allred for Keras 3, on TensorFlow, JAX and PyTorch: `distributed`, callbacks, checkpoints. See docs/keras.md.

Importing it chooses no backend: set KERAS_BACKEND, as for `import keras`.
"""

import sys

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ModuleNotFoundError(
        f"allred.keras needs Keras, and {sys.executable} has none: install it with a backend: docs/install.md",
        name="keras",
    ) from None

if keras.backend.backend() == "jax":
    import allred.jax  # noqa: F401  (before the first computation of JAX)

from allred.keras import callbacks
from allred.keras.keras_optimizer import distributed
from allred.watch.framework_errors import raise_allred_errors

__all__ = ["callbacks", "distributed", "raise_allred_errors"]
