"""Attention by inference runtimes, as peers: forward only, no statistics, each with threads of its own.

Each is left out where its package is not installed (`onnx` with `onnxruntime`, `openvino`, `zentorch` with
`deprecated`: in an environment of their own, since importing zentorch changes what torch does).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .harness import Call

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attention_peers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Call]:
    """Every kernel that is installed, takes this dtype, and gives what torch gives."""
    found: dict[str, Call] = {}
    for name, packages, make in (
        ("zentorch, no stats", ("zentorch",), _zentorch),
        ("onnxruntime, no stats", ("onnxruntime", "onnx"), _onnxruntime),
        ("OpenVINO, no stats", ("openvino",), _openvino),
    ):
        if all(importlib.util.find_spec(p) for p in packages) and (call := make(q, k, v, causal)) is not None:
            with sdpa_kernel(SDPBackend.MATH):  # not what zentorch puts in its place
                truth = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
            error = (torch.as_tensor(call()).float().reshape(truth.shape) - truth).abs().max()
            assert error <= TOLERANCE[q.dtype], f"{name} is off by {error}"
            found[name] = call
    return found


def _zentorch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    importlib.import_module("zentorch")
    return lambda: torch.ops.zentorch.zentorch_sdpa(q, k, v, 0.0, causal)[0]


def _onnxruntime(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call | None:
    """`com.microsoft.MultiHeadAttention`, on operands as it wants them: (batch, n, heads * dim); float32 on a CPU."""
    if q.dtype != torch.float32:
        return None
    onnx, ort = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    batch, heads, n, dim = q.shape
    names = ["query", "key", "value"]
    node = onnx.helper.make_node(
        "MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=heads, unidirectional=int(causal)
    )
    info = [onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, (batch, n, heads * dim)) for x in names]
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, (batch, n, heads * dim))
    sets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "attention", info, [out]), opset_imports=sets)
    model.ir_version = 10
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or its threads take the next peer's time
    session: Any = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {x: t.transpose(1, 2).reshape(batch, n, heads * dim).numpy() for x, t in zip(names, (q, k, v), strict=True)}

    def call() -> Tensor:
        found = torch.from_numpy(session.run(None, given)[0])
        return found.view(batch, n, heads, dim).transpose(1, 2)

    return call


def _openvino(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """`scaled_dot_product_attention`, on operands in their dtype and with that dtype as its hint of precision."""
    ov = importlib.import_module("openvino")
    half = q.dtype == torch.bfloat16
    kind = ov.Type.bf16 if half else ov.Type.f32
    parameters = [ov.opset13.parameter(list(q.shape), kind) for _ in range(3)]
    attention = ov.opset13.scaled_dot_product_attention(*parameters, causal=causal)
    hints = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "bf16" if half else "f32"}
    request: Any = ov.Core().compile_model(ov.Model([attention], parameters), "CPU", hints).create_infer_request()

    def tensor(x: Tensor) -> object:
        return (
            ov.Tensor(x.view(torch.int16).numpy(), x.shape, kind) if half else ov.Tensor(x.numpy(), shared_memory=True)
        )

    held = [tensor(x) for x in (q, k, v)]
    for i, x in enumerate(held):
        request.set_input_tensor(i, x)

    def call() -> Tensor:
        request.infer()
        out = request.get_output_tensor(0)
        return torch.from_numpy(out.data).view(torch.bfloat16 if half else torch.float32)

    return call
