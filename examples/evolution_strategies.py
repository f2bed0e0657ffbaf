"""An evolution strategy: each rank tries its own perturbations, and all make the same update.

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
    noise = [np.random.default_rng([generation, i]).normal(size=50) for i in mine]
    scores = [-np.square(params + SIGMA * n - target).sum() for n in noise]
    over_all = allred.statistics(scores)
    weights = (np.array(scores) - over_all.mean) / over_all.std
    gradient = allred.allreduce(weights @ noise, allred.Sum) / (POPULATION * SIGMA)
    opt.step([params], [-gradient])  # the same on all ranks
if allred.rank() == 0:
    print(f"distance to the optimum: {np.linalg.norm(params - target):.1f}")
