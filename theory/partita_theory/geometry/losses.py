"""Cross entropy, squared error and losses that bend them: values, gradients, curvature.

Two habits of squared error are in use, half the mean square and the mean square; `half` names the one meant; torch's
MSELoss has half=False.
"""

from __future__ import annotations

from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from partita_theory._domain import Number, above_zero, number, require
from partita_theory.information.shannon import entropy_of, kl
from partita_theory.law import softmax_jacobian, softmax_vjp


class ClassifierGradients(NamedTuple):
    """Gradients of the mean cross entropy of logits = inputs @ weight.T + bias."""

    logits: Tensor  # (n_sample, n_class)
    probs: Tensor  # (n_sample, n_class)
    target: Tensor  # (n_sample, n_class)
    weight: Tensor  # (n_class, dim)
    bias: Tensor  # (n_class,)
    inputs: Tensor  # (n_sample, dim)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:  # (..., n), (..., n) -> (...)
    """Cross entropy with soft targets; -log p_c only when the target is one-hot.

        CE = log Z * sum(y) - <y, z>        (M-LOSS-1)

    Equal to ``F.cross_entropy(logits, target, reduction="none")`` for sum(y) = 1.

    >>> soft_cross_entropy(torch.zeros(4), torch.full((4,), 0.25))  # log 4
    tensor(1.3863)
    """
    return torch.logsumexp(logits, -1) * target.sum(-1) - torch.where(target > 0, target * logits, 0.0).sum(-1)


def cross_entropy_decomposition(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a cross entropy that no model can remove, and the part that is its fault.

        CE(y, p) = H(y) + KL(y || p),     for sum(y) = 1        (M-LOSS-1, M-GIB-6)

    >>> cross_entropy_decomposition(torch.zeros(2), torch.tensor([0.5, 0.5]))  # all floor, no fault
    (tensor(0.6931), tensor(0.))
    """
    return entropy_of(target), kl(target, torch.softmax(logits, -1))


def cross_entropy_gradients(
    inputs: Tensor,  # (n_sample, dim)
    weight: Tensor,  # (n_class, dim)
    target: Tensor,  # (n_sample, n_class)
    bias: Tensor | None = None,  # (n_class,)
) -> ClassifierGradients:
    """Gradients of the mean cross entropy with respect to every argument; the sign is plus.

        d/dz = (p * sum(y) - y) / N,   d/dp = -y/p / N,   d/dy = -log p / N
        d/dW = sum_n (p - y) x^T / N,   d/db = sum_n (p - y) / N,   d/dx = W^T (p - y) / N        (M-LOSS-2)

    Does not vanish on samples that are confidently wrong, does on those that are confidently right.

    >>> g = cross_entropy_gradients(torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[1.0, 0.0]]))
    >>> g.weight  # (1/2, 1/2) - (1, 0)
    tensor([[-0.5000],
            [ 0.5000]])
    """
    z = inputs @ weight.T if bias is None else inputs @ weight.T + bias
    log_p = torch.log_softmax(z, -1)
    p, n = log_p.exp(), inputs.shape[0]
    residual = (p * target.sum(-1, keepdim=True) - target) / n
    by_p = torch.where(target > 0, -target / p, 0.0) / n
    return ClassifierGradients(residual, by_p, -log_p / n, residual.T @ inputs, residual.sum(0), residual @ weight)


cross_entropy_hessian_logits = softmax_jacobian  # positive semidefinite; it does not depend on the target


def cross_entropy_hessian_weights(
    inputs: Tensor,  # (n_sample, dim)
    probs: Tensor,  # (n_sample, n_class)
) -> Tensor:  # (n_class * dim, n_class * dim)
    """Second derivative of the mean cross entropy by the flattened (row-major) weight matrix.

        (1/N) sum_n J(p_n) kron x_n x_n^T        (M-LOSS-3)

    Positive semidefinite, with a null space of dimension at least dim: the same vector added to every class changes
    nothing. Dense; `cross_entropy_hvp` multiplies without it.
    From Bohning (1992), Multinomial logistic regression algorithm.

    >>> cross_entropy_hessian_weights(torch.tensor([[2.0]]), torch.tensor([[0.5, 0.5]]))  # 4 * J
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    n, dim = inputs.shape
    n_class = probs.shape[-1]
    blocks = torch.einsum("nab,ni,nj->aibj", softmax_jacobian(probs), inputs, inputs) / n
    return blocks.reshape(n_class * dim, n_class * dim)


def cross_entropy_hvp(
    inputs: Tensor,  # (n_sample, dim)
    probs: Tensor,  # (n_sample, n_class)
    vector: Tensor,  # (n_class, dim)
) -> Tensor:  # (n_class, dim)
    """That Hessian times a weight-shaped vector, at the cost of two matrix products.

        H U = (1/N) sum_n J(p_n) (U x_n) x_n^T        (M-LOSS-3)

    >>> cross_entropy_hvp(torch.tensor([[2.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0], [0.0]]))
    tensor([[ 1.],
            [-1.]])
    """
    return softmax_vjp(probs, inputs @ vector.T).T @ inputs / inputs.shape[0]


class RegressionGradients(NamedTuple):
    """Gradients of the squared error of prediction = inputs @ weight + bias."""

    prediction: Tensor
    weight: Tensor
    bias: Tensor


def squared_error_gradients(
    inputs: Tensor,  # (n_sample, dim)
    target: Tensor,  # (n_sample,) or (n_sample, n_out)
    prediction: Tensor,
    *,
    half: bool = False,
) -> RegressionGradients:
    """Gradients of the squared error of a linear model; twice as large without the half.

        half:  d/dyhat = (yhat - y) / N,    d/dw = X^T (yhat - y) / N,    d/db = mean(yhat - y)        (M-LOSS-4)

    >>> squared_error_gradients(torch.ones(1, 1), torch.tensor([1.0]), torch.tensor([3.0]), half=True).weight
    tensor([2.])
    """
    factor = 1.0 if half else 2.0
    residual = factor * (prediction - target) / inputs.shape[0]
    return RegressionGradients(residual, inputs.T @ residual, residual.sum(0))


def squared_error_hessian(inputs: Tensor, n_out: int = 1, *, half: bool = False) -> Tensor:
    """Second derivative by the weights of a *linear* model: constant; unique minimum iff X^T X is invertible.

        half:  I_out kron X^T X / N        (M-LOSS-4)

    for weights flattened output by output.

    >>> squared_error_hessian(torch.tensor([[1.0], [3.0]]), half=True)  # (1 + 9) / 2
    tensor([[5.]])
    """
    gram = inputs.T @ inputs / inputs.shape[0]
    return (1.0 if half else 2.0) * torch.kron(torch.eye(n_out, dtype=inputs.dtype, device=inputs.device), gram)


def sigmoid_squared_error_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """Derivative of (sigmoid(z) - y)^2 by z; its last factor is taken at the pre-activation z, and it kills both ends.

        2 (sigmoid(z) - y) sigmoid(z) (1 - sigmoid(z))        (M-LOSS-5)

    >>> sigmoid_squared_error_gradient(torch.tensor(0.0), torch.tensor(1.0))  # 2 * -1/2 * 1/4
    tensor(-0.2500)
    """
    p = torch.sigmoid(logits)
    return 2 * (p - target) * p * (1 - p)


def sigmoid_squared_error_curvature(logits: Tensor, target: Tensor) -> Tensor:
    """Second derivative of (sigmoid(z) - y)^2 by z: negative where the model is confidently wrong, so not convex.

        2 [ s'^2 + (s - y) s'' ],     s' = s (1 - s),   s'' = s' (1 - 2 s)        (M-LOSS-5)

    >>> sigmoid_squared_error_curvature(torch.tensor(0.0), torch.tensor(1.0))  # 2 / 16
    tensor(0.1250)
    """
    s = torch.sigmoid(logits)
    first = s * (1 - s)
    return 2 * (first**2 + (s - target) * first * (1 - 2 * s))


def softmax_squared_error_gradient(logits: Tensor, target: Tensor) -> Tensor:  # (..., n)
    """Derivative of |softmax(z) - y|^2 by z: the whole Jacobian takes part, not its diagonal alone.

        2 J(p) (p - y)        (M-LOSS-5)

    >>> softmax_squared_error_gradient(torch.zeros(2), torch.tensor([1.0, 0.0]))
    tensor([-0.5000,  0.5000])
    """
    p = torch.softmax(logits, -1)
    return 2 * softmax_vjp(p, p - target)


def softmax_squared_error_hessian(logits: Tensor, target: Tensor) -> Tensor:  # (..., n, n)
    """Second derivative of |softmax(z) - y|^2 by z: the first part is never negative, the others can be.

        2 [ J J + sum_i u_i d2p_i/dz2 ],     u = p - y        (M-LOSS-5)

    where the sum is diag(J u) - (J u) p^T - p (J u)^T.

    >>> softmax_squared_error_hessian(torch.zeros(2), torch.tensor([1.0, 0.0]))[0]  # 2 J J: J J = J / 2
    tensor([ 0.2500, -0.2500])
    """
    p = torch.softmax(logits, -1)
    jac, u = softmax_jacobian(p), p - target
    v = softmax_vjp(p, u)
    outer = v[..., :, None] * p[..., None, :]
    second = torch.diag_embed(v) - outer - outer.mT
    return 2 * (jac @ jac + second)


class Curvature(NamedTuple):
    """What the eigenvalues of a Hessian say."""

    smallest: Tensor
    largest: Tensor
    trace: Tensor
    null: Tensor
    convex: Tensor


def sigmoid_gradients(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by the logit of squared error and of cross entropy of one sigmoid unit.

        2 (s - y) s (1 - s)    and    s - y        (M-LOSS-2, M-LOSS-5)

    Confidently wrong, the first vanishes and the second is near 1; confidently right, both vanish.

    >>> sigmoid_gradients(torch.tensor(0.0), torch.tensor(1.0))
    (tensor(-0.2500), tensor(-0.5000))
    """
    return sigmoid_squared_error_gradient(logits, target), torch.sigmoid(logits) - target


def gradient_attenuation(logits: Tensor, target: Tensor) -> Tensor:  # (..., n), (..., n) -> (...)
    """Length of the squared-error gradient by logits over that of cross entropy: the Jacobian's toll.

        |2 J(p) (p - y)| / |p - y|   <=  2 |J|_2  <=  1,     0 at p = y        (M-LOSS-5, M-DER-7)

    >>> gradient_attenuation(torch.zeros(2), torch.tensor([1.0, 0.0]))  # at a tie nothing is lost
    tensor(1.)
    """
    length = (torch.softmax(logits, -1) - target).norm(dim=-1)
    mse = softmax_squared_error_gradient(logits, target).norm(dim=-1)
    return torch.where(length > 0, mse / length.clamp(min=torch.finfo(length.dtype).tiny), 0.0)


def curvature_summary(hessian: Tensor, tolerance: float = 1e-9) -> Curvature:  # (..., n, n)
    """Extreme eigenvalues, trace, size of the null space, and whether a Hessian is that of a convex function.

        convex  iff  smallest eigenvalue >= -tolerance * largest        (M-LOSS-3, M-LOSS-5, M-INC-5)

    >>> s = curvature_summary(torch.diag(torch.tensor([2.0, 0.0])))
    >>> s.largest.item(), s.null.item(), s.convex.item()
    (2.0, 1, True)
    """
    values = torch.linalg.eigvalsh(hessian)
    size = values.abs().amax(-1, keepdim=True)
    null = (values.abs() <= tolerance * size).sum(-1)
    convex = (values >= -tolerance * size).all(-1)
    return Curvature(values[..., 0], values[..., -1], values.sum(-1), null, convex)


class Smoothing(NamedTuple):
    """A smoothed cross entropy, split into what it adds up from."""

    loss: Tensor
    hard: Tensor
    to_uniform: Tensor
    floor: Tensor


def weighted_cross_entropy_gradient(
    logits: Tensor,  # (n_sample, n_class)
    target: Tensor,  # (n_sample,)
    weight: Tensor,  # (n_class,)
    *,
    by_weight: bool = True,
) -> Tensor:  # (n_sample, n_class)
    """Gradient of the mean class-weighted cross entropy by logits.

        w_c (p - e_c) / sum of w          (by_weight False:  / number of samples)        (M-LOSS-7)

    Torch divides by the sum of weights; a batch of weight 0 is refused.

    >>> weighted_cross_entropy_gradient(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([3.0, 1.0]))
    tensor([[-0.5000,  0.5000]])
    """
    w = weight[target]
    total = w.sum() if by_weight else w.new_tensor(float(len(target)))
    require(total > 0, "the classes of this batch have total weight 0, so its weighted mean is 0/0.")
    one_hot = torch.nn.functional.one_hot(target, logits.shape[-1]).to(logits.dtype)
    return w[:, None] * (torch.softmax(logits, -1) - one_hot) / total


def focal_gradient(
    logits: Tensor,  # (..., n_class)
    target: Tensor,  # (...)
    gamma: float = 2.0,
    alpha: float = 1.0,
) -> Tensor:  # (..., n_class)
    """Gradient by logits of the focal loss -alpha (1 - p_t)^gamma log p_t.

        alpha [ gamma (1 - p_t)^(gamma - 1) p_t log p_t - (1 - p_t)^gamma ] (e_t - p)        (M-LOSS-8)

    gamma = 0 is cross entropy. 1 - p_t is summed from the other classes, so that it keeps its digits.
    From Lin, Goyal, Girshick, He and Dollar (2017), Focal loss for dense object detection.

    >>> focal_gradient(torch.zeros(2), torch.tensor(0), gamma=0.0)
    tensor([-0.5000,  0.5000])
    """
    require(gamma >= 0, f"gamma must not be negative; got {gamma}.")
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    one_hot = torch.nn.functional.one_hot(target, logits.shape[-1]).to(logits.dtype)
    log_t = (log_p * one_hot).sum(-1, keepdim=True)
    rest = (p * (1 - one_hot)).sum(-1, keepdim=True)
    # p_t log p_t / (1 - p_t) tends to -1 as p_t tends to 1: the product stays finite for every gamma > 0.
    ratio = torch.where(rest > 1e-12, log_t.exp() * log_t / rest.clamp(min=1e-12), -1.0)
    return alpha * rest**gamma * (gamma * ratio - 1) * (one_hot - p)


def label_smoothing_parts(logits: Tensor, target: Tensor, epsilon: float) -> Smoothing:
    """A label-smoothed cross entropy and its parts; the gradient by logits is p - y'.

        y' = (1 - e) e_t + e / C,      loss = (1 - e) CE + e (KL(u || p) + log C)        (M-LOSS-9)

    It pulls on KL(u || p); an entropy bonus pulls on KL(p || u).
    From Szegedy, Vanhoucke, Ioffe, Shlens and Wojna (2016), Rethinking the Inception architecture for computer vision.

    >>> label_smoothing_parts(torch.zeros(2), torch.tensor(0), 0.5).loss  # log 2 whatever e
    tensor(0.6931)
    """
    require(0 <= epsilon <= 1, f"epsilon is a fraction, so 0 <= epsilon <= 1; got {epsilon}.")
    log_p = torch.log_softmax(logits, -1)
    n_class = logits.shape[-1]
    hard = -log_p.gather(-1, target[..., None]).squeeze(-1)
    to_uniform = -log_p.mean(-1) - log(n_class)
    loss = (1 - epsilon) * hard + epsilon * (to_uniform + log(n_class))
    return Smoothing(loss, hard, to_uniform, torch.full_like(loss, float(smoothing_floor(n_class, epsilon))))


def smoothing_floor(n_class: int, epsilon: float) -> Tensor:
    """The least a label-smoothed cross entropy can be: the entropy of the smoothed target.

        H(y')        (M-LOSS-9)

    >>> round(smoothing_floor(5, 0.1).item(), 4)  # 0.92 and four times 0.02
    0.3897
    """
    top, rest = number(1 - epsilon + epsilon / n_class), number(epsilon / n_class)
    return -torch.xlogy(top, top) - (n_class - 1) * torch.xlogy(rest, rest)


def gaussian_nll(residual: Tensor, sigma: Number) -> Tensor:
    """Negative log-likelihood of a residual under normal noise: squared error with its constant.

        r^2 / (2 sigma^2) + log(sigma sqrt(2 pi))        (M-LOSS-10)

    >>> gaussian_nll(torch.tensor(0.0), 1.0)
    tensor(0.9189)
    """
    s = above_zero("sigma", sigma, residual.dtype)
    return residual**2 / (2 * s**2) + s.log() + 0.5 * log(2 * pi)


def laplace_nll(residual: Tensor, b: Number) -> Tensor:
    """Negative log-likelihood of a residual under Laplace noise: absolute error with its constant.

        |r| / b + log(2 b)        (M-LOSS-10)

    >>> laplace_nll(torch.tensor(1.0), 0.5)  # 2 + log 1
    tensor(2.)
    """
    b = above_zero("b", b, residual.dtype)
    return residual.abs() / b + (2 * b).log()


def hinge_mass(margin: Tensor) -> Tensor:
    """What exp(-hinge) sums to over the two labels: not constant, so hinge is no negative log-likelihood.

        exp(-max(0, 1 - m)) + exp(-max(0, 1 + m))        (M-RMK-6)

    >>> hinge_mass(torch.tensor(0.0))  # 2 / e
    tensor(0.7358)
    """
    return torch.exp(-(1 - margin).clamp(min=0)) + torch.exp(-(1 + margin).clamp(min=0))
