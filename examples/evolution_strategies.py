"""An evolution strategy: each rank evaluates its own perturbations.

    mpirun -np 2 python examples/evolution_strategies.py

The last line is:

    distance to the optimum: 0.3
"""

import numpy as np

import allred

POPULATION, SIGMA = 64, 0.1

allred.init()
target = np.linspace(-1, 1, 50)
mine = range(allred.rank(), POPULATION, allred.size())  # of the population
params, opt = np.zeros(50), allred.optim.Adam(lr=0.05)
for generation in range(150):
    seeds = [[generation, i] for i in mine]
    noise = [np.random.default_rng(seed).normal(size=50) for seed in seeds]
    scores = [-np.square(params + SIGMA * n - target).sum() for n in noise]
    stats = allred.statistics(scores)
    weights = (np.array(scores) - stats.mean) / stats.std
    gradient = allred.allreduce(weights @ noise, allred.Sum)
    gradient /= -POPULATION * SIGMA  # of minus the score
    opt.step([params], [gradient])
if allred.rank() == 0:
    print(f"distance to the optimum: {np.linalg.norm(params - target):.1f}")
