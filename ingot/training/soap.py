"""SOAP: Adam in the eigenbasis of Shampoo (Vyas et al. 2024, SOAP: Improving and Stabilizing
Shampoo using Adam), for weights that are matrices.

With G the gradient, t the step counted from 1, A the basis of the rows and B of the columns:

    M = b1 M + (1 - b1) G
    V = b2 V + (1 - b2) (A' G B)^2
    N = (A' M B) / (1 - b1^t) / (sqrt(V / (1 - b2^t)) + eps)
    W = W - lr (A N B' + d W)
    L = b L + (1 - b) G G'           R = b R + (1 - b) G' G
    every f steps:  A = Q of the QR of (L A),  B = Q of the QR of (R B)

b is b2 if `shampoo_beta` is not given. The first gradient does not update the weights: it
initializes L and R, and A and B as their eigenvectors. The authors' code does the same, because a
gradient is diagonal in its own basis, and Adam would amplify the off-diagonal entries. A dimension
larger than `max_precond_dim` is not preconditioned.

If L or R has repeated eigenvalues (as L of a tall matrix has at first), the basis is not unique,
and the updates depend on the choice of the eigensolver.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.core.errors import ConfigError


class SOAP(Optimizer):
    """SOAP for parameter groups of matrices, each with its `lr` and `weight_decay`.

    >>> weight = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = SOAP([weight], lr=0.1)
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    ...     optimizer.step()
    >>> weight.detach()
    tensor([[0.9000, 0.0000],
            [0.0000, 0.9000]])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
    ) -> None:
        beta = betas[1] if shampoo_beta is None else shampoo_beta
        options = {"lr": lr, "betas": betas, "shampoo_beta": beta, "eps": eps}
        preconditioning = {
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }
        super().__init__(params, {**options, **preconditioning})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dim() != 2:
                raise ConfigError(
                    f"SOAP: parameters must be matrices, got shape {tuple(p.shape)}",
                    hint="use another optimizer for the other parameters",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights by their gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if state:
                    self._update(group, p, state)
                    self._update_basis(group, p.grad, state)
                else:
                    self._init_state(group, p, state)

    def _init_state(self, group: dict[str, Any], p: Tensor, state: dict[str, Tensor]) -> None:
        grad = p.grad
        assert grad is not None
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        for side, moments in (("left", grad @ grad.T), ("right", grad.T @ grad)):
            if len(moments) <= group["max_precond_dim"]:
                state[f"{side}_moments"] = moments.mul_(1 - group["shampoo_beta"])
                # In descending order of eigenvalues, which the QR steps preserve.
                state[f"{side}_basis"] = torch.linalg.eigh(moments)[1].flip(1).contiguous()

    def _update(self, group: dict[str, Any], p: Tensor, state: dict[str, Tensor]) -> None:
        grad, (b1, b2) = p.grad, group["betas"]
        assert grad is not None
        state["step"] += 1
        t = float(state["step"])
        rotated = _to_basis(state, grad)
        state["exp_avg"].lerp_(grad, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(rotated, rotated, value=1 - b2)
        scale = (state["exp_avg_sq"] / (1 - b2**t)).sqrt_().add_(group["eps"])
        update = _from_basis(state, _to_basis(state, state["exp_avg"]).div_(scale))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"] / (1 - b1**t))

    def _update_basis(self, group: dict[str, Any], grad: Tensor, state: dict[str, Tensor]) -> None:
        weight = 1 - group["shampoo_beta"]
        for side, g in (("left", grad), ("right", grad.T)):
            if (moments := state.get(f"{side}_moments")) is None:
                continue
            moments.mul_(group["shampoo_beta"]).addmm_(g, g.T, alpha=weight)
            if int(state["step"]) % group["precondition_frequency"] == 0:
                basis = state[f"{side}_basis"]
                basis.copy_(torch.linalg.qr(moments @ basis)[0])


def _to_basis(state: dict[str, Tensor], x: Tensor) -> Tensor:
    x = state["left_basis"].T @ x if "left_basis" in state else x
    return x @ state["right_basis"] if "right_basis" in state else x.clone()


def _from_basis(state: dict[str, Tensor], x: Tensor) -> Tensor:
    x = state["left_basis"] @ x if "left_basis" in state else x
    return x @ state["right_basis"].T if "right_basis" in state else x
