"""Modules: they hold parameters and settings, and call the faces."""

from partita.nn.attention import EntropyInvariantAttention, MultiheadAttention
from partita.nn.contrastive import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, SupConLoss
from partita.nn.controller import TemperatureController
from partita.nn.entropy import entropy_loss
from partita.nn.losses import (
    BrierLoss,
    CrossEntropyLoss,
    DistillationLoss,
    FocalLoss,
    LinearCrossEntropyLoss,
    MAELoss,
    MSELoss,
    NCELoss,
)
from partita.nn.qk_clip import qk_clip_
from partita.nn.sharpness import init_sharpness_
from partita.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer
from partita.scale import ScalableSoftmax

__all__ = [
    "BrierLoss",
    "ClipLoss",
    "CrossEntropyLoss",
    "DistillationLoss",
    "EntropyInvariantAttention",
    "FocalLoss",
    "InfoNCELoss",
    "LinearCrossEntropyLoss",
    "MAELoss",
    "MSELoss",
    "MultiheadAttention",
    "NCELoss",
    "NTXentLoss",
    "ScalableSoftmax",
    "SigLipLoss",
    "SupConLoss",
    "TemperatureController",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "entropy_loss",
    "init_sharpness_",
    "qk_clip_",
]
