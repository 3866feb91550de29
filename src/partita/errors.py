"""What partita raises, always before anything is computed.

PartitaError
├── ShapeError        sizes do not fit together                      (ValueError)
├── DtypeError        a tensor of the wrong kind of number           (TypeError, ValueError)
├── DeviceError       tensors on different devices                   (ValueError)
├── ValueRangeError   a number outside its domain                    (ValueError)
├── TargetError       an index that names no key                     (IndexError, ValueError)
└── BackendError      unknown backend, or one that cannot serve      (RuntimeError, ValueError)
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "DeviceError",
    "DtypeError",
    "PartitaError",
    "ShapeError",
    "TargetError",
    "ValueRangeError",
]


class PartitaError(Exception):
    """Base of every error partita raises on purpose."""


class ShapeError(PartitaError, ValueError):
    """Sizes do not fit together."""


class DtypeError(PartitaError, TypeError, ValueError):
    """A tensor holds the wrong kind of number."""


class DeviceError(PartitaError, ValueError):
    """Tensors live on different devices."""


class ValueRangeError(PartitaError, ValueError):
    """A number is outside its domain."""


class TargetError(PartitaError, IndexError, ValueError):
    """An index names no key."""


class BackendError(PartitaError, RuntimeError, ValueError):
    """The backend is unknown, or cannot serve the request."""
