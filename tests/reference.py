"""The definitions, dense and in float64: the oracle that every other file is judged by.

    s_ij    = softcap(scale_i * <query_i, key_j>) + bias_ij        -inf where row i may not see key j
    p(j|i)  = exp(s_ij) / Z_i,      Z_i = sum_j exp(s_ij)

Which keys a row may see is an explicit bool tensor `visible` (..., n_query, n_key). Everything after `score` is a
function of that matrix of scores. An empty row (no visible key) has log_partition and max_score -inf, every other
statistic 0, nll +inf and gradient 0. This file imports torch alone and shares no code with the rest: an oracle that
does proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

INF = math.inf
Compare = Callable[[Tensor, Tensor], Tensor]  # (..., n_query, dim), (..., n_key, dim) -> (..., n_query, n_key)


# Scores ---------------------------------------------------------------------------------------------------------------


def score(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    *,
    scale: float | Tensor = 1.0,  # number, or (..., n_query)
    bias: Tensor | None = None,  # broadcasts to (..., n_query, n_key)
    softcap: float | None = None,
    visible: Tensor | None = None,  # bool, broadcasts to (..., n_query, n_key)
    compare: Compare | None = None,  # what is in the place of the inner product
) -> Tensor:  # (..., n_query, n_key)
    """s_ij = softcap(scale_i * <query_i, key_j>) + bias_ij, and -inf where not visible; a bias of -inf masks too."""
    raw = inner(query.double(), key.double()) if compare is None else compare(query.double(), key.double())
    factor = scale.double()[..., None] if isinstance(scale, Tensor) and scale.ndim > 0 else scale
    s = cap(factor * raw, softcap)
    if bias is not None:
        # A bias of -inf hides its key, whatever that key's score is: nan - inf would not.
        hidden = bias.double().isneginf()
        s = torch.where(hidden, -INF, s + bias.double().masked_fill(hidden, 0.0))
    return s if visible is None else torch.where(visible, s, -INF)


def inner(query: Tensor, key: Tensor) -> Tensor:
    """<query, key>."""
    return query @ key.mT


def cosine(query: Tensor, key: Tensor) -> Tensor:
    """<query, key> / (|query| |key|)."""
    return unit(query) @ unit(key).mT


def squared_distance(query: Tensor, key: Tensor) -> Tensor:
    """-|query - key|^2 / 2."""
    return -((query[..., :, None, :] - key[..., None, :, :]) ** 2).sum(-1) / 2


def distance(query: Tensor, key: Tensor) -> Tensor:
    """-|query - key|."""
    square = 2 * -squared_distance(query, key)
    apart = square > 0  # at no distance the slope is 0, not that of a root at 0
    return -torch.where(apart, torch.where(apart, square, 1.0).sqrt(), 0.0)


def bilinear(query: Tensor, key: Tensor, form: Tensor) -> Tensor:
    """<query W, key> / sqrt(dim_key)."""
    return query @ form @ key.mT / math.sqrt(key.shape[-1])


def additive(query: Tensor, key: Tensor, own: Tensor, other: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
    """<v, tanh(W query + U key + b)>."""
    return torch.tanh((query @ own.mT + shift)[..., :, None, :] + (key @ other.mT)[..., None, :, :]) @ weight


def log_sigmoid(query: Tensor, key: Tensor, sharpness: Tensor | float, threshold: Tensor | float) -> Tensor:
    """log(1 / (1 + exp(threshold - sharpness <query, key>))), each a number or one per head, (heads, 1, 1)."""
    return -torch.log1p(torch.exp(threshold - sharpness * (query @ key.mT)))


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """softcap(x) = c * tanh(x / c)."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


# Row statistics: functions of s (..., n_query, n_key) -----------------------------------------------------------------


def seen(s: Tensor) -> Tensor:
    """Which keys a row sees: those whose score is not -inf (nan is seen)."""
    return ~s.isneginf()


def visible(s: Tensor) -> Tensor:
    """n_i = number of keys that row i sees."""
    return seen(s).sum(-1)


def log_partition(s: Tensor) -> Tensor:
    """log Z_i = log sum_j exp(s_ij)."""
    empty = visible(s) == 0
    # The rows without keys are replaced before the logarithm: a `where` after it alone would leave nan gradients.
    safe = s.masked_fill(empty[..., None], 0.0)
    return torch.logsumexp(safe, -1).masked_fill(empty, -INF)


def log_probs(s: Tensor) -> Tensor:
    """log p(j|i) = s_ij - log Z_i, and -inf where not visible."""
    log_z = log_partition(s)
    finite = torch.where(log_z.isneginf(), 0.0, log_z)
    return torch.where(seen(s), torch.where(seen(s), s, 0.0) - finite[..., None], -INF)


def probs(s: Tensor) -> Tensor:
    """p(j|i) = exp(s_ij - log Z_i); a row of zeros where the support is empty."""
    return log_probs(s).exp()


def mean_score(s: Tensor) -> Tensor:
    """E[s] = sum_j p_j s_j over the visible keys."""
    return (probs(s) * torch.where(seen(s), s, 0.0)).sum(-1)


def score_variance(s: Tensor) -> Tensor:
    """Var[s] = sum_j p_j (s_j - E[s])^2 over the visible keys."""
    return (probs(s) * torch.where(seen(s), s - mean_score(s)[..., None], 0.0) ** 2).sum(-1)


def entropy(s: Tensor) -> Tensor:
    """H = -sum_j p_j log p_j over the visible keys, in nats."""
    return (probs(s) * torch.where(seen(s), -log_probs(s), 0.0)).sum(-1)


def effective_width(s: Tensor) -> Tensor:
    """exp(H)."""
    return entropy(s).exp()


def max_score(s: Tensor) -> Tensor:
    """max_j s_ij, and -inf where there is none."""
    return s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -INF)


def expectation(s: Tensor, value: Tensor) -> Tensor:  # (..., n_query, dim_value)
    """E[v] = sum_j p_j value_j over the visible keys."""
    p, v = probs(s), value.double()
    if v.isfinite().all():
        return p @ v
    # 0 * nan is nan: what a row does not see is left out of its sum, not multiplied by zero.
    return torch.where(seen(s)[..., None], p[..., None] * v[..., None, :, :], 0.0).sum(-2)


# A target per row: (..., n_query) key indices -------------------------------------------------------------------------


def target_score(s: Tensor, target: Tensor) -> Tensor:
    """s_i,target_i."""
    keys = torch.arange(s.shape[-1], device=s.device)
    return torch.where(keys == target[..., None], s, 0.0).sum(-1)


def nll(s: Tensor, target: Tensor) -> Tensor:
    """-log p(target_i|i) = log Z_i - s_i,target_i, and +inf where the target is not visible."""
    t = target_score(s, target)
    hidden = t.isneginf()
    return torch.where(hidden, INF, log_partition(s) - torch.where(hidden, 0.0, t))


def log_prob(s: Tensor, target: Tensor) -> Tensor:
    """log p(target_i|i)."""
    return -nll(s, target)


def target_rank(s: Tensor, target: Tensor) -> Tensor:
    """How many visible keys score higher than the target."""
    return (s > target_score(s, target)[..., None]).sum(-1)


def top(s: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best scores and their keys, best first; -inf and -1 past the visible keys."""
    padded = torch.nn.functional.pad(s, (0, max(0, k - s.shape[-1])), value=-INF)
    scores, indices = padded.sort(stable=True, dim=-1, descending=True)
    return scores[..., :k], indices[..., :k].masked_fill(scores[..., :k].isneginf(), -1)


# Columns, and the ends of a row ---------------------------------------------------------------------------------------


def received(s: Tensor, weight: Tensor | None = None, moved: Tensor | float = 1.0) -> Tensor:  # (..., n_key)
    """sum_i weight_i p(j|i): what each key receives from all rows. `moved` is what rounding does to each p."""
    p = probs(s) * moved
    # A row gives nothing to a key it does not see, whatever its weight is: 0 * nan would be nan.
    return (p if weight is None else torch.where(seen(s), weight.double()[..., None] * p, 0.0)).sum(-2)


def gaps(s: Tensor, edges: Tensor) -> Tensor:  # (..., n_query, n_edge)
    """#{ j visible : max_k s_ik - s_ij <= edge }: how many keys lie within each edge of the largest score."""
    gap = max_score(s)[..., None] - s
    gap = torch.where(s == max_score(s)[..., None], 0.0, gap)
    return (seen(s)[..., None, :] & (gap[..., None, :] <= edges.double()[:, None])).sum(-1)


def argmax(s: Tensor) -> Tensor:
    """The first key whose score is the largest, and -1 where there is none."""
    return first_at(s, max_score(s))


def first_at(s: Tensor, level: Tensor) -> Tensor:
    """The first visible key with this score; in a row that holds nan, the first nan."""
    hit = seen(s) & ((s == level[..., None]) | s.isnan())
    keys = torch.arange(s.shape[-1], device=s.device)
    found = torch.where(hit, keys, s.shape[-1])
    first = found.amin(-1) if s.shape[-1] else found.sum(-1)
    return torch.where(hit.any(-1), first, -1)


# Two distributions over the same keys: p of scores s, q of scores t ---------------------------------------------------


def kl(s: Tensor, t: Tensor) -> Tensor:
    """KL(p||q) = sum_j p_j (log p_j - log q_j): +inf if p sees a key that q does not, 0 if p sees none."""
    difference = torch.where(seen(s) & seen(t), log_probs(s) - log_probs(t), 0.0)
    outside = (seen(s) & ~seen(t)).any(-1)
    return torch.where(outside, INF, (probs(s) * difference).sum(-1))


def divergence(s: Tensor, t: Tensor, kind: str = "forward", beta: float = 0.5) -> Tensor:
    """forward KL(p||q), reverse KL(q||p), cross_entropy -sum_j p_j log q_j, hellinger 1 - sum_j sqrt(p_j q_j), and

        js = beta KL(p||m) + (1 - beta) KL(q||m)        m = beta p + (1 - beta) q

    An empty row of p gives 0.
    """
    p, q = probs(s), probs(t)
    if kind == "forward":
        found = kl(s, t)
    elif kind == "reverse":
        found = kl(t, s)
    elif kind == "cross_entropy":
        found = kl(s, t) + entropy(s)
    elif kind == "hellinger":
        both = seen(s) & seen(t)
        root = torch.where(both, torch.where(both, log_probs(s) + log_probs(t), 0.0).div(2).exp(), 0.0)
        found = 1 - root.sum(-1)
    else:
        # Keys that neither sees are replaced first: the derivative of log(0 + 0) would be nan. So would the second one
        # of log(0 + q), in logaddexp: where one alone sees a key, its own part is all there is.
        a = torch.where(seen(s), log_probs(s), 0.0) + math.log(beta)
        b = torch.where(seen(t), log_probs(t), 0.0) + math.log(1 - beta)
        m = torch.where(seen(s) & seen(t), torch.logaddexp(a, b), torch.where(seen(s), a, b))
        own = torch.where(seen(s), log_probs(s) - m, 0.0)
        other = torch.where(seen(t), log_probs(t) - m, 0.0)
        found = (beta * p * own + (1 - beta) * q * other).sum(-1)
    return torch.where(visible(s) == 0, 0.0, found)


# Faces ----------------------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    value: Tensor,  # (..., n_key, dim_value)
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,  # broadcasts to (..., n_query)
) -> Tensor:
    """o_i = sum_j exp(s_ij) value_j / (exp(sink_i) + sum_j exp(s_ij)); scale is 1/sqrt(dim) unless given."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    s = score(query, key, scale=scale, bias=bias, softcap=softcap, visible=visible)
    out = expectation(s, value)
    return out if sink is None else out * kept_from(s, sink)[..., None]


def kept_from(s: Tensor, sink: Tensor) -> Tensor:  # (..., n_query)
    """Z_i / (exp(sink_i) + Z_i): 1 for a sink of -inf, and in a row that sees nothing, which has nothing to keep."""
    level = log_partition(s)
    whole = level.isneginf() | sink.double().isneginf()
    # replaced before the difference: -inf - -inf is nan
    difference = torch.where(whole, 0.0, level) - torch.where(whole, 0.0, sink.double())
    return torch.where(whole, 1.0, torch.sigmoid(difference))


def repeat_heads(x: Tensor, n_head: int) -> Tensor:
    """Grouped queries: query head h reads the key head h // (n_head / n_key_head); heads are dimension -3."""
    return x.repeat_interleave(n_head // x.shape[-3], dim=-3)


def linear_cross_entropy(
    input: Tensor,  # (..., dim)
    linear_weight: Tensor,  # (n_class, dim)
    target: Tensor,  # (...) class indices
    *,
    linear_bias: Tensor | None = None,  # (n_class,)
    weight: Tensor | None = None,  # (n_class,)
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    entropy_weight: float = 0.0,
    sample_weight: Tensor | None = None,  # (...)
) -> Tensor:
    """Cross entropy of a linear classifier and its regularisers, averaged over the rows that are not ignored.

        y_i    = (1 - smoothing) [c = target_i] + smoothing / n_class
        loss_i = sample_weight_i * ( -sum_c weight_c y_ic log p(c|i) + z_loss * (log Z_i)^2 - entropy_weight * H_i )
        mean   = sum_i loss_i / sum_i sample_weight_i * weight_target_i

    All rows ignored: 0.
    """
    factor = scale.double()[..., None] if isinstance(scale, Tensor) and scale.ndim > 0 else scale
    raw = factor * (input.double() @ linear_weight.double().mT)
    s = cap(raw if linear_bias is None else raw + linear_bias.double(), softcap)
    n_class = s.shape[-1]
    w = s.new_ones(n_class) if weight is None else weight.double()
    sample = s.new_ones(target.shape) if sample_weight is None else sample_weight.double()

    kept = target != ignore_index
    index = torch.where(kept, target, 0)
    y = (1.0 - label_smoothing) * torch.nn.functional.one_hot(index, n_class).double() + label_smoothing / n_class
    loss = -(w * y * log_probs(s)).sum(-1) + z_loss * log_partition(s) ** 2 - entropy_weight * entropy(s)
    loss = torch.where(kept, sample * loss, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = torch.where(kept, sample * w[index], 0.0).sum()
    return loss.sum() / total if kept.any() else 0.0 * loss.sum()


def reduce_mean(loss: Tensor, reduction: str) -> Tensor:
    """torch's reduction of a vector of losses."""
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def unit(x: Tensor) -> Tensor:
    """x / |x|."""
    return x.double() / (x.double() ** 2).sum(-1, keepdim=True).sqrt()


def info_nce(
    query: Tensor,  # (N, dim)
    positive_key: Tensor,  # (N, dim)
    negative_keys: Tensor | None = None,  # (M, dim) unpaired, (N, M, dim) paired
    *,
    temperature: float = 0.07,
    negative_mode: str = "unpaired",
    normalize: bool = True,
    symmetric: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """-log of the probability of the positive among the candidates, scores <q, k> / temperature.

    Candidates are the positives of the whole batch, or, where negative_keys is given, one's own positive and those.
    Symmetric: the mean of both directions (positives asking for their queries).
    """
    q, k = (unit(x) if normalize else x.double() for x in (query, positive_key))
    if negative_keys is None:
        rows = torch.arange(len(q), device=q.device)
        loss = nll(q @ k.mT / temperature, rows)
        return reduce_mean((loss + nll(k @ q.mT / temperature, rows)) / 2 if symmetric else loss, reduction)
    negative = unit(negative_keys) if normalize else negative_keys.double()
    others = q @ negative.mT if negative_mode == "unpaired" else torch.einsum("nd,nmd->nm", q, negative)
    s = torch.cat([(q * k).sum(-1, keepdim=True), others], -1) / temperature
    return reduce_mean(nll(s, s.new_zeros(len(q), dtype=torch.long)), reduction)


def clip(image: Tensor, text: Tensor, logit_scale: float | Tensor, logit_bias: float | Tensor = 0.0) -> Tensor:
    """(CE of rows + CE of columns) / 2 of the matrix logit_scale * image @ text.T + logit_bias, diagonal targets."""
    s = logit_scale * (image.double() @ text.double().mT) + logit_bias
    rows = torch.arange(len(s), device=s.device)
    return (nll(s, rows).mean() + nll(s.mT, rows).mean()) / 2


def nt_xent(out0: Tensor, out1: Tensor, *, temperature: float = 0.5) -> Tensor:
    """2N unit anchors; the positive is the other view, the candidates are all anchors but oneself."""
    x = unit(torch.cat([out0, out1]))
    n = len(out0)
    other = torch.arange(2 * n, device=x.device).roll(n)
    s = (x @ x.mT / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=x.device), -INF)
    return nll(s, other).mean()


def supcon(
    embeddings: Tensor,  # (N, dim)
    labels: Tensor,  # (N,)
    *,
    temperature: float = 0.1,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
) -> Tensor:
    """mean_i of mean_{j positive of i} -log p(j|i), over anchors that have a positive; without any, 0.

    Candidates are the other embeddings, or all of ref_emb; a positive is a candidate with the anchor's label.
    """
    x = unit(embeddings)
    keys = x if ref_emb is None else unit(ref_emb)
    key_labels = labels if ref_labels is None else ref_labels
    itself = torch.eye(len(x), len(keys), dtype=torch.bool, device=x.device) & (ref_emb is None)
    s = (x @ keys.mT / temperature).masked_fill(itself, -INF)
    positive = (labels[:, None] == key_labels) & ~itself
    count = positive.sum(-1)
    loss = -torch.where(positive, log_probs(s), 0.0).sum(-1) / count.clamp(min=1)
    return loss[count > 0].mean() if bool((count > 0).any()) else 0.0 * x.sum()


# Scale policies: n is the number of visible keys of a row, d the dimension --------------------------------------------


def inverse_sqrt(n: Tensor, d: int) -> Tensor:
    """1 / sqrt(d)."""
    return torch.full_like(n, 1.0 / math.sqrt(d), dtype=torch.float64)


def constant(n: Tensor, d: int, x: float) -> Tensor:
    """x."""
    return torch.full_like(n, x, dtype=torch.float64)


def log_count(n: Tensor, floor: int = 1) -> Tensor:
    """log max(n, floor): an empty row counts as one key, so that no policy is infinite there."""
    return n.double().clamp(min=floor).log()


def kappa_log(n: Tensor, d: int, kappa: float = 1.0) -> Tensor:
    """kappa * log(n) / d."""
    return kappa * log_count(n) / d


def log_length(n: Tensor, d: int, reference: int = 512, floor: int = 4) -> Tensor:
    """log(max(n, floor)) / log(reference) / sqrt(d)."""
    return log_count(n, floor) / math.log(reference) / math.sqrt(d)


def sqrt_log_length(n: Tensor, d: int, reference: int = 512, floor: int = 4) -> Tensor:
    """sqrt(log(max(n, floor)) / log(reference)) / sqrt(d)."""
    return (log_count(n, floor) / math.log(reference)).sqrt() / math.sqrt(d)


def mixed(n: Tensor, d: int, alpha: float = 1.0, beta: float = 0.1) -> Tensor:
    """alpha / sqrt(d) + beta * log(n) / d."""
    return alpha / math.sqrt(d) + beta * log_count(n) / d


def max_length(n: Tensor, d: int, n_max: int, kappa: float = 1.0) -> Tensor:
    """kappa * log(n_max) / d, whatever n."""
    return torch.full_like(n, kappa * math.log(n_max) / d, dtype=torch.float64)


def calibrated_log(n: Tensor, d: int, reference: int, sigma: float) -> Tensor:
    """kappa * log(n) / d with kappa = d / (sigma * sqrt(log(reference)))."""
    return kappa_log(n, d, kappa=d / (sigma * math.sqrt(math.log(reference))))


def gaussian_entropy(n: Tensor, d: int, entropy: float, sigma: float) -> Tensor:
    """sqrt(2 * max(0, log(n) - entropy)) / sigma."""
    return (2.0 * (log_count(n) - entropy).clamp(min=0.0)).sqrt() / sigma


def scalable_softmax(n: Tensor, d: int, s: Tensor) -> Tensor:
    """s_head * log(n) / sqrt(d), for n (..., n_head, n_query) and s (n_head,)."""
    return s.double()[:, None] * log_count(n) / math.sqrt(d)


def solve_scale(s: Tensor, entropy_target: Tensor | float, *, cap: float = 1e6, steps: int = 200) -> Tensor:
    """The scale at which the entropy of scale * s is the target, by bisection of [0, cap].

    H falls from log(n) at 0 to log(number of maxima): a higher target gives 0, a lower one a scale
    at which H has reached that limit to the last digit, or the cap.
    """
    # Only differences count (H is blind to a shift), and scores at their peak do not overflow.
    c = torch.where(seen(s), s - max_score(s)[..., None], -INF)
    low, high = s.new_zeros(s.shape[:-1]), s.new_full(s.shape[:-1], cap)
    for _ in range(steps):
        middle = (low + high) / 2
        too_wide = entropy(torch.where(seen(s), middle[..., None] * c, -INF)) > entropy_target
        low, high = torch.where(too_wide, middle, low), torch.where(too_wide, high, middle)
    return torch.where(visible(s) > 1, (low + high) / 2, 0.0)
