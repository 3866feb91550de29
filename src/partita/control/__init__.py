"""Act on what a model's softmaxes do, while it trains.

clip = partita.control.QKClip(model, threshold=100.0)
...
optimizer.step()
clip.step()
clip.max_scores                      # of the step just taken, per layer and head
"""

from __future__ import annotations

from partita.control.qk_clip import QKClip, lightning_qk_clip_callback, qk_clip_callback

__all__ = ["QKClip", "lightning_qk_clip_callback", "qk_clip_callback"]
