"""hvd.elastic: training with commits. Under `allred run` a restarted job continues from the last commit.

    @hvd.elastic.run
    def train(state):
        while state.epoch < 90:
            for number, (x, y) in enumerate(loader):
                ...
                state.sampler.record_batch(number, batch_size)
                if number % 100 == 99:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
    train(state)

Horovod changes the number of ranks inside of running processes. allred starts all processes again (`allred run
--restarts`, `allred resize`), so a commit is also written to a file, which the next start reads.
"""

from allred.torch.elastic.elastic_states import ElasticSampler, ObjectState, State, TorchState
from allred.torch.elastic.restartable_job import run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
