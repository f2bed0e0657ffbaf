"""Logistic regression by L-BFGS of scipy, each rank with its own rows.

    mpirun -np 2 python examples/scipy_lockstep.py

The last line is:

    accuracy: 0.9..., equal on all ranks: True
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.datasets import load_breast_cancer  # pip install scikit-learn
from sklearn.preprocessing import scale

import allred

allred.init()
x, y = load_breast_cancer(return_X_y=True)
x, y = scale(x), 2.0 * y - 1
mine = slice(allred.rank(), None, allred.size())  # the rows of this rank


@allred.distributed.gradients(op=allred.Sum, values=True)  # sums over all rows
def loss_and_gradient(w):
    margin = y[mine] * (x[mine] @ w)
    loss = np.logaddexp(0, -margin).sum()
    return loss, -x[mine].T @ (y[mine] * expit(-margin))


found = minimize(loss_and_gradient, np.zeros(30), jac=True, method="L-BFGS-B")
accuracy = np.mean(np.sign(x @ found.x) == y)
equal = len(set(allred.allgather_object(found.x.tobytes()))) == 1
if allred.rank() == 0:
    print(f"accuracy: {accuracy:.3f}, equal on all ranks: {equal}")
