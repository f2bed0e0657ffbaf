"""Worlds for tests in one process, without init()."""

import contextlib

from allred import numbering, world
from allred.world import World


@contextlib.contextmanager
def installed(shape=None, **fields):
    """Install a World with this topology, by default of one rank, and other fields of it."""
    world.install(World(topology=shape or numbering.number([0], 0), **fields))
    try:
        yield world.current()
    finally:
        world.install(None)
        world.install(None)  # also forgets the watcher of the world that was closed
