"""trl's trainers on this library's passes: one call before training, trl's options as they are.

    undo = partita.adapters.trl.install()
    ...                                          # SFT, DPO, KTO, GRPO, RLOO, distillation
    undo()                                       # or: with install(): ...

trl projects hidden states a tile of the vocabulary at a time in a function of its own,

    z_iv = softcap(logit_scale (<hidden_i, weight_v> + bias_v)) / temperature        log p_i(v) = z_iv - log Z_i

from which its trainers make their losses and metrics. `install` puts `log_probs` in its place, and `divergence` in that
of the function that compares a student with a teacher. Trainers of trl that make whole logits (CPO, ORPO) call neither
and stay as they are. Results are float32, as trl's are; sums of float64 inputs are float64 until then.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from partita.adapters._installed import Installed, put
from partita.comparison import divergence as divergence_of
from partita.errors import BackendError
from partita.gibbs import Gibbs, sharper
from partita.losses.vocabulary import collision, distribution
from partita.precision import accumulation_dtype, autocasts, no_autocast
from partita.recompute import in_row_blocks

__all__ = ["Installed", "divergence", "install", "log_probs"]

MADE_FOR = "1.16.0"
OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # in trl's order, after log_probs


def install() -> Installed:
    """Let trl's trainers take log-probabilities, entropy and divergences from this library; the result undoes it.

    Losses, metrics and gradients are those of trl to rounding. A second call before the first is undone is refused, and
    so is a trl whose functions take other arguments than those of 1.16.

    >>> with install():  # doctest: +SKIP
    ...     trl.GRPOTrainer(model, reward_funcs=reward, args=arguments, train_dataset=prompts).train()
    """
    return put(
        "trl",
        MADE_FOR,
        {
            ("trl.trainer.utils", "_ChunkedLogProbFunction"): SimpleNamespace(apply=log_probs),
            ("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction"): SimpleNamespace(apply=divergence),
        },
    )


def log_probs(
    hidden: Tensor,  # (n, dim)
    weight: Tensor,  # (vocabulary, dim)
    bias: Tensor | None,  # (vocabulary,)
    targets: Tensor,  # (n,)
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = OPTIONAL,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """log p of each target, and as asked for in `outputs`: entropy, log sum p^2, mean logit, whether it is the argmax.

    Equal to ``trl.kernels.ChunkedLogProbFunction.apply`` in its own arguments. The mean logit is that over the
    vocabulary, each token counted once. log p and entropy have gradients; both and the argmax come from one pass,
    `log_sum_sq_probs` from a second. `chunk_size` is trl's and decides nothing here: no logits are held.

    >>> hidden, weight, target = torch.zeros(1, 4), torch.zeros(10, 4), torch.tensor([0])
    >>> log_probs(hidden, weight, None, target, 1.0, 32768)  # -log 10, log 10, log 1/10, 0, the first of those that tie
    (tensor([-2.3026]), tensor([2.3026]), tensor([-2.3026]), tensor([0.]), tensor([True]))
    """
    p = _head(hidden, weight, bias, temperature, final_logit_softcapping, logit_scale)
    entropy = log_sum_sq = mean_logit = top = None
    sums = p.reduce(target=targets, statistics="entropy" in outputs, variance=False, argmax="is_top1" in outputs)
    if "entropy" in outputs:
        entropy = sums.state.entropy().float()
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            log_sum_sq = collision(sums.state, sharper(p, 2.0).state(statistics=False)).float()
        if "mean_logits" in outputs:
            mean_logit = _mean_logit(p).float()
    if sums.argmax is not None:
        top = sums.argmax == targets
    return -sums.nll().float(), entropy, log_sum_sq, mean_logit, top


def divergence(
    student_hidden: Tensor,  # (n, dim of the student)
    student_weight: Tensor,  # (vocabulary, dim of the student)
    student_bias: Tensor | None,
    teacher_hidden: Tensor,  # (n, dim of the teacher)
    teacher_weight: Tensor,  # (vocabulary, dim of the teacher)
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
) -> tuple[Tensor, Tensor]:
    """How far a student is from its teacher, per token, and the student's entropy, which has no gradient.

        beta = 0   KL(teacher || student)          beta = 1   KL(student || teacher)
        between    beta KL(teacher || m) + (1 - beta) KL(student || m),   m = beta teacher + (1 - beta) student

    Equal to ``trl.kernels.chunked_divergence.ChunkedDivergenceFunction.apply`` in its own arguments; the teacher gets
    no gradient.

    >>> teacher = torch.tensor([[3.0], [1.0]]).log()
    >>> divergence(torch.ones(1, 1), torch.zeros(2, 1), None, torch.ones(1, 1), teacher, None, 0.0)  # log 2 - H
    (tensor([0.1308]), tensor([0.6931]))
    """
    student = _head(
        student_hidden, student_weight, student_bias, temperature, student_final_logit_softcapping, student_logit_scale
    )
    bias = None if teacher_bias is None else teacher_bias.detach()
    teacher = _head(
        teacher_hidden.detach(), teacher_weight.detach(), bias, temperature, teacher_final_logit_softcapping,
        teacher_logit_scale,
    )  # fmt: skip
    with torch.no_grad():
        entropy = student.entropy()
    if beta in (0.0, 1.0):
        found = divergence_of(teacher, student, "reverse" if beta else "forward")
    else:
        found = divergence_of(teacher, student, "js", beta=beta)
    return found.float(), entropy.float()


def _head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, logit_scale: float
) -> Gibbs:
    """softcap(factor x) / T = factor softcap'(x) / T with softcap' = softcap / factor.

    Products are in the dtype of the hidden states, or autocast's, whatever that of the head (it may be kept in float32,
    or the hidden states raised to it).
    """
    if hasattr(weight, "ds_id"):
        raise BackendError(
            "a head that DeepSpeed's ZeRO stage 3 spreads over processes is gathered for trl's own function alone; "
            "undo partita.adapters.trl.install(), or use stage 2."
        )
    if not autocasts(hidden.device.type):
        weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(accumulation_dtype(hidden.dtype))  # it is divided by the temperature
    softcap = None if softcap is None else softcap / logit_scale
    return distribution(hidden, weight, bias, temperature / logit_scale, softcap)


def _mean_logit(p: Gibbs) -> Tensor:
    """The mean of all scores of a row: without a softcap the score of the mean key."""
    dtype, scale, cap = accumulation_dtype(p.query.dtype), float(p.scale), p.softcap
    offset = p.query.new_zeros(1, dtype=dtype) if p.bias is None else p.bias[0].to(dtype)
    with no_autocast(p.query):
        if cap is None:
            return scale * (p.query.to(dtype) @ p.key.mean(0, dtype=dtype)) + offset.mean()

        def mean(query: Tensor, key: Tensor, offset: Tensor) -> Tensor:
            return (cap * torch.tanh((scale * (query @ key.mT).to(dtype) + offset) / cap)).mean(-1)

        key = p.key.to(p.query.dtype)
        return in_row_blocks(mean, [p.query], [key, offset], len(key))
