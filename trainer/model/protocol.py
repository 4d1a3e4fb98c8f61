"""The interface between trainer and model: the `SequenceModel` protocol and its `ModelOutput`.

The state is one row of numbers per group, as the ledger keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

GATE_SHARPNESS: Final = 8.0
"""c of `a = exp(-c * softplus(Lambda) * sigmoid(r))`, as in De et al. 2024 (arXiv 2402.19427)."""
FEW_TOKENS = 8
Role = Literal["embedding", "output", "matrix", "kernel", "vector"]
"""Of a parameter: a table of embeddings; the layer that gives the logits; another matrix; one with
more dimensions; norms, biases, decay rates and what else is a number for each of some features."""
_TABLES = {"tok_emb", "pos_emb", "wte", "wpe"}
_OUTPUTS = {"head", "lm_head", "output", "unembed", "unembedding", "embed_out"}
_VECTORS = {"A_log", "D", "dt_bias", "bias", "gain", "scale"}
_LAYERS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)


class ModelOutput(NamedTuple):
    """The result of one forward pass."""

    logits: Tensor
    """Scores over the vocabulary, [B, T, V]; row t predicts `targets[:, t]`."""
    state: Tensor | None = None
    """The state after each row's last position, [B, state_width]; None from a model without state.
    A model without `state_width` may return any nest of tensors [B, ...] (docs/models.md)."""
    losses: Mapping[str, Tensor] | None = None
    """Auxiliary losses, which are trained on too: those that `loss_keys` declares."""
    metrics: Mapping[str, Any] | None = None
    """Numbers to report, as `Run.record` takes them: those that `metric_keys` lists."""


def extras_of(output: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Losses and metrics of an output, which need not have the fields."""
    given = {key: getattr(output, key, None) for key in ("losses", "metrics")}
    found = {key: value for key, value in given.items() if value is not None}
    return found.get("losses", {}), found.get("metrics", {})


class SequenceModel(Protocol):
    """A `torch.nn.Module` that predicts the next token and may carry a state from cell to cell.

    A model with `state_width == 0` has no state: it receives `state=None` and returns `state=None`.
    Without the attribute, `[model] target` and `family` determine it from a forward pass, and the
    state may be any nest of tensors (docs/contracts.md: it must then return one).

    Optional: `flops_per_token(seq_len)`, the FLOPs per trained token of both passes, a multiply-add
    counted as two (MFU needs it); `resets` in `forward`, passed by name and only where documents
    begin within rows; `resets_in_one_pass = True` if such rows run at one shape and cost no more
    than others; `loss_keys` and `metric_keys`, the names of the output's losses and metrics.
    """

    state_width: int
    """Size of one group's state; 0: the model has no state."""

    def __call__(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Run `tokens` (int64 [B, T]; series: floats [B, T, F]) from `state` ([B, state_width] or None).

        `resets` (bool [B, T]; None: nowhere) is True at a document's first token, also the first of
        a row: before that token the state is set to zero. Tokens and state are passed by name, too.
        """
        ...


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode for a while, uncompiled: other shapes would be compiled anew."""
    modes = [(module, module.training) for module in model.modules()]  # a part may be in eval()
    is_compiled = any(each._compiled_call_impl or hasattr(each, "_orig_mod") for each, _ in modes)
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            yield
    finally:
        model.train(modes[0][1])  # some layers do more than to note it
        for module, was_training in modes:
            module.training = was_training


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name of a parameter's further places in the model -> its first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """The role of each parameter, by its name, from what the model says of it, and not from sizes
    that agree: `get_input_embeddings`, `get_output_embeddings` (of any part of it), the kind of the
    layer, a parameter's attribute `_no_weight_decay`, and names in common use otherwise.

    A tied table is an embedding. To be called before sharding, which drops parameters' attributes.
    """
    tables, outputs, roles = set(), set(), dict[str, Role]()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            tables.add(id(module.weight))
        *above, name = path.split(".")
        if isinstance(module, nn.Linear) and name in _OUTPUTS and not any(each.isdigit() for each in above):
            outputs.add(id(module.weight))  # in a numbered layer, `output` is that layer's own
        for getter, found in (("get_input_embeddings", tables), ("get_output_embeddings", outputs)):
            with suppress(NotImplementedError):  # as transformers answers for parts without
                layer = getattr(module, getter, lambda: None)()
                found.add(id(getattr(layer, "weight", layer)))  # which may be the parameter
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        layer = model.get_submodule(owner)
        dims = parameter.ndim if isinstance(layer, _LAYERS) else sum(size > 1 for size in parameter.shape)
        is_called = name in _TABLES or ("embed" in name and name not in _OUTPUTS)
        if getattr(parameter, "_no_weight_decay", False):
            roles[path] = "vector"
        elif id(parameter) in tables or (is_called and dims == 2):
            roles[path] = "embedding"
        elif id(parameter) in outputs:
            roles[path] = "output"
        elif dims < 2 or name in _VECTORS:
            roles[path] = "vector"
        else:
            roles[path] = "matrix" if parameter.ndim == 2 else "kernel"
    return roles
