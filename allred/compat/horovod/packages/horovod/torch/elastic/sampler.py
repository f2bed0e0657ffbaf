"""The sampler of horovod.torch.elastic, from allred.torch.elastic."""

from allred.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
