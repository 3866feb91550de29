"""Attention matrices as operators: eigenvalues, ranks, heads, projections, initialisation.

An operator that is a `partita.Gibbs` is applied, never built: a forward step is an expectation, a backward step the
gradient of an expectation with respect to its values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partita.gibbs import Gibbs
from partita.support import Support
from partita_theory._domain import Number, above_zero, number, public, require, require_shape, where
from partita_theory.geometry.simplex import jensen_shannon
from partita_theory.information.shannon import Bounds, collision_log_mass, entropy_of


class Stationary(NamedTuple):
    """A law that a step leaves alone, and how nearly it does."""

    probs: Tensor  # (..., n)
    residual: Tensor  # (...), l1 distance between the law and its image
    steps: int


def push(gibbs: Gibbs, x: Tensor) -> Tensor:  # (..., n_key) -> (..., n_query)
    """A step of the operator: average x over the keys each row sees. Streams.

        (A x)_i = sum_j p(j|i) x_j        (M-SPE-1)

    >>> push(partita.Gibbs(torch.zeros(2, 1), torch.zeros(4, 1)), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([2.5000, 2.5000])
    """
    return gibbs.expectation(x[..., None].to(gibbs.query.dtype)).squeeze(-1)


def pull(gibbs: Gibbs, y: Tensor) -> Tensor:  # (..., n_query) -> (..., n_key)
    """A step of the transposed operator: where mass on the rows goes. Streams; not differentiable itself.

        (A^T y)_j = sum_i p(j|i) y_i  =  d <y, A x> / d x_j        (M-SPE-1)

    >>> pull(partita.Gibbs(torch.zeros(2, 1), torch.zeros(4, 1)), torch.tensor([0.5, 0.5]))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    with torch.enable_grad():
        shape = (*y.shape[:-1], gibbs.key.shape[-2])
        x = torch.zeros(shape, dtype=gibbs.query.dtype, device=y.device, requires_grad=True)
        image = push(gibbs, x)
        (out,) = torch.autograd.grad(image, x, y.to(image.dtype))
    return out


def stationary(gibbs: Gibbs, *, steps: int = 200, tolerance: float = 1e-10) -> Stationary:
    """The law of the keys after many steps, by power iteration from the uniform law. Streams.

        pi = A^T pi,     sum pi = 1        (M-SPE-1)

    Unique when every key is visible to every row. Under a causal mask all mass ends on the first key. Rows without
    keys lose mass, which is put back. Square operators only.

    >>> stationary(partita.Gibbs(torch.zeros(4, 1), torch.zeros(4, 1))).probs
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    n = _square(gibbs)
    batch = gibbs.log_partition().shape[:-1]
    probs = torch.full((*batch, n), 1.0 / n, dtype=gibbs.query.dtype, device=gibbs.query.device)
    residual = torch.full(batch, torch.inf, dtype=probs.dtype, device=probs.device)
    taken = 0
    for taken in range(1, steps + 1):  # noqa: B007 (reported)
        new = pull(gibbs, probs)
        new = new / new.sum(-1, keepdim=True)
        residual = (new - probs).abs().sum(-1)
        probs = new
        if bool((residual <= tolerance).all()):
            break
    return Stationary(probs, residual, taken)


def leading_eigenvalues(
    gibbs: Gibbs, k: int = 4, *, steps: int = 12, generator: torch.Generator | None = None
) -> Tensor:  # (k,) complex
    """The k eigenvalues of largest modulus, from a Krylov space built by expectations alone. Streams; one operator.

        V = orthonormal basis of [X, A X, A^2 X, ...],     eigenvalues of the small V^T A V        (M-SPE-1)

    The first is 1 (a weighted mean of ones is one). Others may be complex or negative. X has k columns, so that an
    eigenvalue that repeats up to k times is seen as often. Keeps k * steps vectors of length n; exact once that
    reaches n, approximate before.

    >>> e = leading_eigenvalues(partita.Gibbs(torch.zeros(4, 1).double(), torch.zeros(4, 1).double()), 2)
    >>> [round(abs(x), 6) for x in e.tolist()]  # the uniform operator: 1, then nothing
    [1.0, 0.0]
    """
    n = _square(gibbs)
    require_shape(gibbs.log_partition().dim() == 1, "leading_eigenvalues takes one operator; loop over the batch.")
    require(k >= 1, f"k must be at least 1; got {k}.")
    drawn = torch.randn(n, min(k, n), generator=generator, dtype=torch.float64, device=where(generator))
    block = drawn.to(gibbs.query.device)
    basis, images = block[:, :0], block[:, :0]
    for _ in range(steps):
        block = _new_directions(basis, block)
        if block.shape[1] == 0:
            break
        image = gibbs.expectation(block.to(gibbs.query.dtype)).double().detach()
        basis, images, block = torch.cat([basis, block], 1), torch.cat([images, image], 1), image
    values = torch.linalg.eigvals(basis.T @ images)
    order = values.abs().argsort(descending=True)[:k]
    return torch.nn.functional.pad(values[order], (0, k - len(order)))


def spectral_gap(gibbs: Gibbs, *, steps: int = 12, generator: torch.Generator | None = None) -> Tensor:  # ()
    """How fast repeated attention forgets: one minus the second largest modulus. Streams.

        1 - |lambda_2|,     0 if the operator does not mix (packed sequences, permutations)        (M-SPE-1)

    >>> round(spectral_gap(partita.Gibbs(torch.zeros(4, 1).double(), torch.zeros(4, 1).double())).item(), 6)
    1.0
    """
    # Four columns where two are asked for: a wider block converges in fewer passes, and a pass is what costs.
    return 1 - leading_eigenvalues(gibbs, 4, steps=steps, generator=generator)[1].abs()


def singular_value(
    gibbs: Gibbs, *, steps: int = 100, tolerance: float = 1e-9, generator: torch.Generator | None = None
) -> Tensor:  # (...)
    """The largest singular value, by power iteration on A^T A. Streams.

        sigma_1 = max |A x| / |x|  >= 1   for square A        (M-SPE-4)

    >>> round(singular_value(partita.Gibbs(torch.zeros(4, 1).double(), torch.zeros(4, 1).double())).item(), 6)
    1.0
    """
    batch = gibbs.log_partition().shape[:-1]
    size = (*batch, gibbs.key.shape[-2])
    x = 1 + 0.1 * torch.rand(size, generator=generator, dtype=torch.float64, device=where(generator))
    x = (x / x.norm(dim=-1, keepdim=True)).to(gibbs.query.device, gibbs.query.dtype)
    value = torch.zeros(batch, dtype=x.dtype, device=x.device)
    for _ in range(steps):
        image = push(gibbs, x)
        new = image.square().sum(-1).sqrt()
        back = pull(gibbs, image)
        x = back / back.norm(dim=-1, keepdim=True)
        if bool(((new - value).abs() <= tolerance * new).all()):
            return new
        value = new
    return value


def dobrushin(matrix: Tensor) -> Tensor:  # (..., n, n) -> (...)
    """A bound on the second eigenvalue: how different two rows can be. Dense, O(n^3).

        max_ij |A_i - A_j|_1 / 2  >=  |lambda_2|,     0 if all rows are equal, 1 if two share no key        (M-SPE-1)

    From Dobrushin (1956), Central limit theorem for nonstationary Markov chains.

    >>> dobrushin(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    tensor(0.2500)
    """
    return torch.cdist(matrix, matrix, p=1.0).amax((-1, -2)) / 2


def _new_directions(basis: Tensor, block: Tensor) -> Tensor:  # (n, m), (n, b) -> (n, at most b)
    """An orthonormal basis of what block adds to basis; columns that add nothing are dropped."""
    size = block.square().sum(0).sqrt().clamp(min=torch.finfo(block.dtype).tiny)
    block = block / size
    for _ in range(2):  # twice is enough: once loses orthogonality
        block = block - basis @ (basis.T @ block)
    q, r = torch.linalg.qr(block)
    fresh: Tensor = q[:, r.diagonal().abs() > 1e-10]
    return fresh - basis @ (basis.T @ fresh)


def _square(gibbs: Gibbs) -> int:
    n, m = gibbs.query.shape[-2], gibbs.key.shape[-2]
    require_shape(n == m, f"eigenvalues need the same number of queries and keys; got {n} queries and {m} keys.")
    return int(n)


def effective_rank(matrix: Tensor) -> Tensor:  # (..., m, n) -> (...)
    """How many directions a matrix really uses. Dense.

        exp(-sum r_i log r_i),    r = singular values / their sum        (M-SPE-2)

    A uniform attention matrix has width n and rank 1, the identity width 1 and rank n.
    From Roy and Vetterli (2007), The effective rank: a measure of effective dimensionality.

    >>> effective_rank(torch.eye(3))
    tensor(3.)
    """
    s: Tensor = torch.linalg.svdvals(matrix)
    return entropy_of(s / s.sum(-1, keepdim=True)).exp()


def stable_rank(matrix: Tensor) -> Tensor:  # (..., m, n) -> (...)
    """Squared Frobenius norm over squared largest singular value. Dense.

        |A|_F^2 / sigma_1^2        (M-SPE-2)

    From Rudelson and Vershynin (2007), Sampling from large matrices: an approach through geometric functional analysis.

    >>> stable_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    tensor(2.)
    """
    s: Tensor = torch.linalg.svdvals(matrix)
    return s.square().sum(-1) / s[..., 0].square()


def stable_rank_bound(renyi2: Tensor) -> Tensor:  # (..., n_query) -> (...)
    """What wide rows allow at most: their collision probabilities (`information.renyi_entropy`) summed.

        stable rank <= sum_i exp(-H2_i) = |A|_F^2,       as sigma_1 >= 1 for square row-stochastic A        (M-SPE-4)

    >>> stable_rank_bound(torch.tensor([4.0, 4.0, 2.0]).log())  # 1/4 + 1/4 + 1/2
    tensor(1.)
    """
    return torch.exp(-renyi2).sum(-1)


def stable_rank_streaming(
    query: Tensor,  # (..., n, dim)
    key: Tensor,  # (..., n, dim)
    *,
    scale: Number = 1.0,
    bias: Tensor | None = None,
    support: Support | None = None,
    steps: int = 100,
) -> Tensor:  # (...)
    """The stable rank of an attention matrix that is never built.

        sum_i exp(-H2_i) / sigma_1^2        (M-SPE-2, M-SPE-4)

    >>> x = torch.zeros(4, 1, dtype=torch.float64)
    >>> round(stable_rank_streaming(x, x).item(), 6)  # uniform: rank 1
    1.0
    """
    log_mass = collision_log_mass(query, key, scale=scale, bias=bias, support=support)
    top = singular_value(Gibbs(query, key, scale=scale, bias=bias, support=support), steps=steps)
    return log_mass.exp().sum(-1) / top.square()


def von_neumann_entropy(matrix: Tensor) -> Tensor:  # (..., m, n) -> (...)
    """Entropy of the density matrix made from A: between 0 and log rank; not the entropy of its rows. Dense.

        S = -tr(rho log rho),     rho = A^T A / tr(A^T A)        (M-SPE-3)

    From von Neumann (1932), Mathematische Grundlagen der Quantenmechanik.

    >>> von_neumann_entropy(torch.eye(4))  # log 4
    tensor(1.3863)
    """
    q: Tensor = torch.linalg.svdvals(matrix).square()
    return entropy_of(q / q.sum(-1, keepdim=True))


def eigenvalue_entropy(matrix: Tensor) -> Tensor:  # (..., n, n) -> (...) complex
    """The sum -sum e log e over eigenvalues of A itself, complex and meaningless: see `von_neumann_entropy`. Dense.

        -sum_i e_i log e_i          (0 log 0 = 0)        (M-SPE-3)

    >>> abs(eigenvalue_entropy(torch.full((4, 4), 0.25).double()).item()) < 1e-9  # 0, though the rows have log 4
    True
    """
    e = torch.linalg.eigvals(matrix)
    return -torch.where(e.abs() > 1e-12, e * e.log(), 0.0).sum(-1)


class HeadDiversity(NamedTuple):
    """Entropies of the heads of a row, and how different their laws are."""

    mean: Tensor
    least: Tensor
    most: Tensor
    divergence: Tensor


def head_diversity(probs: Tensor) -> HeadDiversity:  # (..., heads, n) -> fields (...)
    """Spread and Jensen-Shannon divergence of the heads of a row. Dense.

        JSD = H(mean over heads of p) - mean over heads of H     in [0, log heads]        (M-INF-6)

    The spread of the *numbers* H is not diversity: two one-hot heads on different keys have H = 0 twice and JSD log 2.

    >>> d = head_diversity(torch.eye(2))
    >>> d.mean.abs().item(), round(d.divergence.item(), 4)
    (0.0, 0.6931)
    """
    each = entropy_of(probs)
    return HeadDiversity(each.mean(-1), each.amin(-1), each.amax(-1), jensen_shannon(probs))


def joint_entropy_bounds(entropies: Tensor) -> Bounds:  # (..., heads) -> (...)
    """What the entropies of the heads allow for the entropy of all their indices together.

        max_r H_r (equal heads)  <=  H(all)  <=  sum_r H_r (independent draws)        (M-INF-6)

    >>> joint_entropy_bounds(torch.tensor([1.0, 2.0]))
    Bounds(lower=tensor(2.), upper=tensor(3.))
    """
    return Bounds(entropies.amax(-1), entropies.sum(-1))


def head_affinity(
    query: Tensor,  # (..., heads, n_query, dim)
    key: Tensor,  # (..., heads, n_key, dim)
    *,
    scale: Number = 1.0,
    power: float = 0.5,
    support: Support | None = None,
) -> Tensor:  # (..., heads, heads, n_query)
    """Overlap of each pair of heads in every row, streaming: scores of two heads add up when vectors are concatenated.

        log sum_j (p_r p_s)^a = log Z(a z_r + a z_s) - a log Z(z_r) - a log Z(z_s),     a = power   (M-INF-6, M-GEO-5)

    power 1/2 is Bhattacharyya's coefficient, power 1 the collision mass. Returned as a logarithm.

    >>> q, k = torch.zeros(2, 1, 1), torch.zeros(2, 4, 1)
    >>> head_affinity(q, k)[0, 1].abs().item()  # equal laws overlap fully: log 1
    0.0
    """
    h = _heads(query, key)
    log_z = Gibbs(query, key, scale=scale, support=support).log_partition()
    rows = []
    for r in range(h):
        both_q = torch.cat([query[..., r : r + 1, :, :].expand_as(query), query], -1)
        both_k = torch.cat([key[..., r : r + 1, :, :].expand_as(key), key], -1)
        pair = Gibbs(both_q, both_k, scale=power * scale, support=support).log_partition()
        rows.append(pair - power * (log_z[..., r : r + 1, :] + log_z))
    return torch.stack(rows, -3)


def head_fisher_rao(query: Tensor, key: Tensor, *, scale: Number = 1.0, support: Support | None = None) -> Tensor:
    """Fisher-Rao distance of each pair of heads in every row, (..., heads, heads, n_query), streaming.

        2 arccos sum_j sqrt(p_r p_s)     in [0, pi]        (M-INF-6, M-GEO-5)

    >>> head_fisher_rao(torch.zeros(2, 1, 1), torch.zeros(2, 4, 1))[0, 1].item()
    0.0
    """
    affinity = head_affinity(query, key, scale=scale, support=support)
    return 2 * torch.acos(affinity.exp().clamp(max=1.0))


def head_cosine(query: Tensor, key: Tensor, *, scale: Number = 1.0, support: Support | None = None) -> Tensor:
    """Cosine of the angle between the weights of each pair of heads, (..., heads, heads, n_query), streaming.

        <p_r, p_s> / (|p_r| |p_s|)        (M-INF-6)

    >>> round(head_cosine(torch.zeros(2, 1, 1), torch.zeros(2, 4, 1))[0, 1].item(), 6)
    1.0
    """
    log_overlap = head_affinity(query, key, scale=scale, power=1.0, support=support)
    own = torch.diagonal(log_overlap, dim1=-3, dim2=-2).movedim(-1, -2)  # (..., heads, n_query)
    return torch.exp(log_overlap - (own[..., :, None, :] + own[..., None, :, :]) / 2)


def head_kl(query: Tensor, key: Tensor, *, scale: Number = 1.0, support: Support | None = None) -> Tensor:
    """KL(head r || head s) of every row, (..., heads, heads, n_query), streaming: one head's mean key is all it needs.

        KL = E_r[z_r] - log Z_r - (scale * <query_s, E_r[key_s]> - log Z_s)        (M-INF-6, M-GEO-2)

    Exact; infinite differences do not occur, as both heads see the same support.

    >>> head_kl(torch.zeros(2, 1, 1), torch.zeros(2, 4, 1))[0, 1].abs().item()
    0.0
    """
    h = _heads(query, key)
    law = Gibbs(query, key, scale=scale, support=support)
    log_z = law.log_partition()
    factor = scale[..., None] if isinstance(scale, Tensor) and scale.dim() else scale
    out = []
    for s in range(h):
        key_s = key[..., s : s + 1, :, :].expand(*key.shape)
        query_s = query[..., s : s + 1, :, :]
        mean = (factor * law.expectation(key_s) * query_s).sum(-1)
        out.append(law.mean_score() - log_z - (mean - log_z[..., s : s + 1, :]))
    return torch.stack(out, -2)


def _heads(query: Tensor, key: Tensor) -> int:
    require_shape(
        query.dim() >= 3 and query.shape[-3] == key.shape[-3],
        f"heads stand at dimension -3 of query and key; got {tuple(query.shape)} and {tuple(key.shape)}.",
    )
    return int(query.shape[-3])


class RowFactors(NamedTuple):
    """W = rotate @ diag(stretch) @ back, in the order a row vector x meets them."""

    rotate: Tensor  # (dim_in, r)
    stretch: Tensor  # (r,)
    back: Tensor  # (r, dim_out)


def row_svd(weight: Tensor) -> RowFactors:  # (dim_in, dim_out)
    """A projection taken apart in the order in which x @ W applies it: U first, then the stretch, then V^T.

        x W = ((x U) S) V^T,     for column vectors, W x, the order is V^T, S, U        (M-RMK-3)

    >>> row_svd(torch.diag(torch.tensor([3.0, 2.0]))).stretch
    tensor([3., 2.])
    """
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    return RowFactors(u, s, vh)


def match_form(weight_q: Tensor, weight_k: Tensor) -> Tensor:  # (dim_model, dim), (dim_model, dim)
    """The matrix with which two inputs are compared: bilinear, of rank at most the head dimension.

        <x W_Q, y W_K> = x (W_Q W_K^T) y^T        (M-ATT-2, M-RMK-3)

    >>> match_form(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [0.0]]))
    tensor([[3., 0.],
            [6., 0.]])
    """
    require_shape(
        weight_q.shape[-1] == weight_k.shape[-1],
        f"query and key projections must end in one dim; got {tuple(weight_q.shape)} and {tuple(weight_k.shape)}.",
    )
    return weight_q @ weight_k.transpose(-1, -2)


def match_singular_values(weight_q: Tensor, weight_k: Tensor, scale: float | None = None) -> Tensor:  # (..., dim)
    """Singular values of the scaled match, without the dim_model x dim_model matrix: O(dim_model dim^2).

        sv(W_Q W_K^T) * scale,      scale None: 1 / sqrt(dim)        (M-RMK-3)

    >>> match_singular_values(torch.eye(3)[:, :1], 2 * torch.eye(3)[:, :1])
    tensor([2.])
    """
    r_q = torch.linalg.qr(weight_q).R
    r_k = torch.linalg.qr(weight_k).R
    factor = weight_q.shape[-1] ** -0.5 if scale is None else scale
    values: Tensor = torch.linalg.svdvals(r_q @ r_k.transpose(-1, -2))
    return factor * values


def score_bound(weight_q: Tensor, weight_k: Tensor, norm_x: float, norm_y: float, scale: float | None = None) -> Tensor:
    """The largest score two inputs of these lengths can have.

        |score| <= sigma_max * |x| * |y|        (M-RMK-3, M-SCL-18)

    >>> score_bound(torch.eye(1), torch.eye(1), 2.0, 3.0)
    tensor(6.)
    """
    return match_singular_values(weight_q, weight_k, scale)[..., 0] * norm_x * norm_y


def xavier_variance(dim_in: int, dim_out: int) -> Tensor:
    """Variance of Xavier-initialised weights.

        2 / (dim_in + dim_out)        (M-INF-4)

    From Glorot and Bengio (2010), Understanding the difficulty of training deep feedforward neural networks.

    >>> xavier_variance(3, 1).item()
    0.5
    """
    require(dim_in >= 1 and dim_out >= 1, f"dimensions must be at least 1; got {dim_in} and {dim_out}.")
    return number(2.0 / (dim_in + dim_out))


def xavier_gain(dim_in: int, dim_out: int) -> Tensor:
    """By how much a Xavier projection multiplies the variance of its input: 1 only for square matrices.

        dim_in * 2 / (dim_in + dim_out)        (M-INF-4)

    Splitting heads before or after initialising matters: 512 -> 64 has gain 1.78, the fused 512 -> 1536 has 0.5.

    >>> round(xavier_gain(512, 64).item(), 3), xavier_gain(512, 1536).item()
    (1.778, 0.5)
    """
    return dim_in * xavier_variance(dim_in, dim_out)


def initial_sharpness(dim_model: int, dim_init: int, input_variance: Number = 1.0) -> Tensor:
    """Sharpness of attention at initialisation with scale 1/sqrt(dim_head) and Xavier projections of shape
    dim_model -> dim_init (one head's, or the fused matrix the initialiser saw).

        sharpness = gain * input_variance        (M-INF-4, M-INF-3)

    >>> initial_sharpness(512, 512).item()
    1.0
    """
    return xavier_gain(dim_model, dim_init) * number(input_variance)


def sharpness_initialiser_std(dim_model: int, sharpness: Number, input_variance: Number = 1.0) -> Tensor:
    """Standard deviation of query and key weights that starts attention at this sharpness (scale 1/sqrt(dim)).

        sd^2 = sharpness / (dim_model * input_variance)        (M-INF-4)

    >>> sharpness_initialiser_std(4, 1.0).item()
    0.5
    """
    return torch.sqrt(above_zero("sharpness", sharpness) / (dim_model * number(input_variance)))


__all__ = public(globals())
