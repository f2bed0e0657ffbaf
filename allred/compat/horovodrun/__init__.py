"""horovodrun and horovod.run: Horovod's launcher, by `allred run`."""
