"""Gradient sets: shapes of the parameters of real models, in the order in which the model creates them.

resnet50      torchvision's ResNet-50: 161 tensors, 25 557 032 elements; most tensors are small, a few have 9 MB
transformer   BERT-base, uncased, with its pooler: 199 tensors, 109 482 240 elements, one tensor of 94 MB
mlp           eight dense layers of 512 units: 16 tensors, 2 101 248 elements; for `bench overlap`
small         1000 tensors of 256 elements: measures the cost per tensor
tiny          one tensor of 256 elements: measures the round trip to a parameter server
"""

from collections.abc import Iterator

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """Convolutions (out, in, height, width), each followed by weight and bias of its batch norm; fc.weight, fc.bias."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _bottleneck(channels, width, downsample=block == 0)
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def _bottleneck(channels: int, width: int, downsample: bool) -> Iterator[Shape]:
    out = 4 * width
    convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
    if downsample:
        convolutions.append((out, channels, 1, 1))
    for convolution in convolutions:
        yield from (convolution, convolution[:1], convolution[:1])


def transformer() -> list[Shape]:
    """Embeddings (word, position, token type, norm), 12 layers of 16 tensors, pooler."""
    hidden, inner = 768, 3072
    norm: list[Shape] = [(hidden,), (hidden,)]
    dense: list[Shape] = [(hidden, hidden), (hidden,)]
    attention = [*dense, *dense, *dense, *dense, *norm]  # query, key, value, output
    layer = [*attention, (inner, hidden), (inner,), (hidden, inner), (hidden,), *norm]
    return [(30522, hidden), (512, hidden), (2, hidden), *norm, *layer * 12, *dense]


def mlp() -> list[Shape]:
    """Eight layers, each a weight (512, 512) and a bias (512,)."""
    layer: list[Shape] = [(512, 512), (512,)]
    return layer * 8


def small() -> list[Shape]:
    """1000 tensors of 1 KiB in float32."""
    return [(256,)] * 1000


def tiny() -> list[Shape]:
    """One tensor of 1 KiB in float32."""
    return [(256,)]


SETS = {"resnet50": resnet50, "transformer": transformer, "small": small}
OVERLAP_SETS = {**SETS, "mlp": mlp}
PS_SETS = {**SETS, "tiny": tiny}
