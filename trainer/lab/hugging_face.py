"""Causal language models of `transformers` whose cache is a recurrent state of a fixed size.

Which families train exactly was measured (docs/models.md). Models with layers of full attention are
refused, since their cache grows. They are read from a directory of `save_pretrained`; nothing is
downloaded.

Built-in families are written as architectures that compute the same up to rounding, so that
`from_pretrained` opens them.
It could go if only own models were trained and exported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.import_path import format_error
from trainer.lab.gated_delta import GatedDelta
from trainer.lab.transformer import ROTARY_BASE, Transformer
from trainer.model.encoder import NORM_EPS
from trainer.model.protocol import ModelOutput

Weights = dict[str, Tensor]
# Without it `transformers` asks on the terminal whether to run code that lies in a directory.
NO_CODE = {"local_files_only": True, "trust_remote_code": False}


class HuggingFace(nn.Module):
    """A causal model of `transformers`; its recurrent cache is the state, tensors [B, ...]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        references_on_cpu(model)
        self.model: Any = model
        taken = inspect.signature(model.forward).parameters
        # Without this key of its config a mixture of experts does not compute its loss.
        self.loss_keys: dict[str, str] = {}
        if "output_router_logits" in taken and getattr(model.config, "output_router_logits", False):
            self.loss_keys["aux_loss"] = "tokens"
        self._cache_name = "cache_params" if "cache_params" in taken else "past_key_values"
        self._places: list[tuple[int, str, int]] | None = None

    def forward(self, tokens: Tensor, state: list[Tensor] | None = None) -> ModelOutput:
        """Predict from tokens [B, T] and the tensors of the cache (None: an empty one)."""
        cache = without_attention(package().DynamicCache(config=self.model.config))
        for layer in cache.layers:  # copies in place would keep gradients from flowing
            layer.update_recurrent_state = functools.partial(_assign, layer)
        if state is not None:
            assert self._places is not None, "a state before the first forward"
            for (layer, name, index), value in zip(self._places, state, strict=True):
                _put(cache.layers[layer], name, index, value)
        output = self.model(input_ids=tokens, use_cache=True, **{self._cache_name: cache})
        held = list(_held(cache))
        self._places = [place for place, _ in held]  # the same in every call
        losses = {name: output[name] for name in self.loss_keys}
        return ModelOutput(output.logits, [value for _, value in held], losses)  # type: ignore[arg-type]

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    def save_pretrained(self, directory: Path) -> None:
        save(self.model, directory)


def build(vocab_size: int, dim: int, num_layers: int, *, model_type: str, **settings: Any) -> HuggingFace:
    """Read a model of a `transformers` family, whose sizes are its own, from the directory `from`
    of `save_pretrained`; a smaller vocabulary gets rows. Raises UserError: it is no such model."""
    folder = settings.pop("from", None)
    fix = f"set from, and no other args, to a directory of save_pretrained with a {model_type} (docs/models.md)"
    if folder is None or settings:
        raise UserError("model.args", f"{model_type} is read from a directory", fix)
    model = read_pretrained(folder, "model.args.from")
    if model.config.model_type != model_type:
        raise UserError("model.args.from", f"{folder} has a {model.config.model_type}", fix)
    if model.config.vocab_size < vocab_size:
        model.resize_token_embeddings(vocab_size)  # such as for the id that begins documents
    return HuggingFace(model)


def read_pretrained(folder: str, key: str, *, trust_code: bool = False) -> Any:
    """The causal model of a directory of `save_pretrained`; with its own code if that is trusted.
    Raises UserError of `key`: there is none."""
    read = package().AutoModelForCausalLM.from_pretrained
    try:
        if not (Path(folder) / "config.json").is_file():
            raise ValueError("it has no config.json")
        return read(folder, **NO_CODE | {"trust_remote_code": trust_code}, dtype=torch.float32)
    except Exception as error:  # of a damaged directory anything
        problem, fix = format_error(error), "name a directory of save_pretrained with a causal model"
        if "trust_remote_code" in problem:
            problem, fix = "it needs the code in it", "train doctor runs that with --trust-code"
        raise UserError(key, f"{folder} cannot be read: {problem}", fix) from error


def without_attention(cache: Any) -> Any:
    """A cache that answers what is asked of layers of attention, of which it has none."""
    cache.get_seq_length = lambda *_, **__: 0
    cache.get_mask_sizes = lambda query_length, *_, **__: (query_length, 0)
    return cache


def _held(cache: Any) -> Iterator[tuple[tuple[int, str, int], Tensor]]:
    """((layer, kind, index), tensor) of all states. Raises UserError: a layer of attention."""
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, package().cache_utils.CacheLayerMixin):  # with a recurrence or not
            problem = f"layer {number} is one of attention, whose cache grows with every token"
            raise UserError("model.args", problem, "name layers with a state of a fixed size alone")
        for name in ("conv", "recurrent"):
            for index, tensor in getattr(layer, f"{name}_states", {}).items():  # none of an MLP alone
                if tensor is not None:
                    yield (number, name, index), tensor


def _put(layer: Any, name: str, index: int, value: Tensor) -> None:
    """Put a state into a layer of a cache; a copy, which the model may write to."""
    getattr(layer, f"{name}_states")[index] = value.clone()
    getattr(layer, f"is_{name}_states_initialized")[index] = True
    layer.has_previous_state[index] = True
    if name == "conv":
        layer.conv_kernel_size[index] = value.shape[-1]


def _assign(layer: Any, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    """Stands for a layer's `update_recurrent_state`."""
    layer.recurrent_states[state_idx] = recurrent_states
    layer.is_recurrent_states_initialized[state_idx] = True
    return recurrent_states


def references_on_cpu(model: nn.Module) -> None:
    """Let functions of the model's module take the kernels of an installed package, which need
    CUDA, for what these take alone.

    `transformers` 5.23 takes them for all tensors, also where a layout is found on the CPU.
    """
    module = sys.modules[type(model).__module__]
    for name, function in list(vars(module).items()):  # changed while it is read
        if "torch_function" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
            setattr(module, name, _by_device(function, function.__wrapped__))


def _by_device(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    taken = inspect.signature(reference).parameters

    @functools.wraps(kernel)
    def run(*args: Any, **given: Any) -> Any:
        first = next(iter((*args, *given.values())))
        if first.is_cuda and first.dtype != torch.float64:
            return kernel(*args, **given)
        return reference(*args, **{name: each for name, each in given.items() if name in taken})

    return run


def writer_of(model: Any) -> Callable[[Path], None] | None:
    """Writes a model into a directory, as `from_pretrained` reads it; None if nothing can."""
    for kind, write in {Transformer: _save_as_llama, GatedDelta: _save_as_qwen3_next}.items():
        if type(model) is kind:  # a subclass may compute something else
            return functools.partial(write, model)
    own: Callable[[Path], None] | None = getattr(model, "save_pretrained", None)
    return own


def package() -> Any:
    """`transformers`, without progress bars and reports of loading, which every rank would show."""
    try:
        package = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError("transformers", format_error(error), "run: pip install transformers") from error
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def save(model: Any, directory: Path) -> None:
    """Write a model of `transformers` so that a plain call of what `from_pretrained` returns works.

    `transformers` 5.23 asks a cache without layers of attention for its length, which raises; such
    a model is written with `use_cache` off, and `generate` reads the whole text for each token.
    """
    if "past_key_values" in inspect.signature(model.forward).parameters:
        try:
            package().DynamicCache(config=model.config).get_seq_length()
        except ValueError:
            model.config.use_cache = model.generation_config.use_cache = False
    model.save_pretrained(directory)


def _save_as_llama(model: Any, directory: Path) -> None:
    attention = model.blocks[0].attention
    config = package().LlamaConfig(
        **_common(model),
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.kv_heads,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
    )
    weights = _outer(model)
    for number, block in enumerate(model.blocks):
        norms = {"input_layernorm": block.attention_norm, "post_attention_layernorm": block.mlp_norm}
        weights |= _block(number, block.mlp, {"self_attn.o_proj": block.attention.out, **norms})
        parts = block.attention.inputs.weight.split((model.dim, model.kv_dim, model.kv_dim))
        for name, part in zip("qkv", parts, strict=True):
            weights[f"model.layers.{number}.self_attn.{name}_proj.weight"] = part
    _save(config, weights, directory)


def _save_as_qwen3_next(model: Any, directory: Path) -> None:
    """As layers of linear attention alone with plain MLPs."""
    heads, width = model.heads, model.dim // model.heads
    config = package().Qwen3NextConfig(
        **_common(model),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        # Attention is that of no layer here, but its sizes are checked against each other.
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width,
        layer_types=["linear_attention"] * model.num_layers,
        linear_conv_kernel_dim=model.blocks[0].mixer.taps.shape[0],
        num_experts=0,
        mlp_only_layers=list(range(model.num_layers)),
        hidden_act="silu",
    )
    weights = _outer(model)
    for number, block in enumerate(model.blocks):
        mixer, own = block.mixer, f"model.layers.{number}"
        modules = {"linear_attn.out_proj": mixer.out, "linear_attn.norm": mixer.norm}
        weights |= _block(number, block.mlp, modules)
        inputs = (*mixer.inputs.weight.chunk(3), mixer.output_gate.weight)  # queries, keys, values
        decay, rate = mixer.gates.weight.chunk(2)
        weights |= {
            f"{own}.linear_attn.in_proj_qkvz.weight": _by_head(heads, *inputs),
            f"{own}.linear_attn.in_proj_ba.weight": _by_head(heads, rate, decay),
            # [3 D, 1, taps], the oldest position first
            f"{own}.linear_attn.conv1d.weight": mixer.taps.flip(0).T[:, None],
            f"{own}.linear_attn.A_log": mixer.log_a,
            f"{own}.linear_attn.dt_bias": mixer.step_bias,
            # It multiplies by 1 + weight.
            f"{own}.input_layernorm.weight": block.mixer_norm.weight - 1.0,
            f"{own}.post_attention_layernorm.weight": block.mlp_norm.weight - 1.0,
        }
    weights["model.norm.weight"] = model.norm.weight - 1.0
    _save(config, weights, directory)


def _common(model: Any) -> dict[str, Any]:
    bos, is_tied = model.vocab_size - 1, model.head.weight is model.embedding.weight
    sizes = {"hidden_size": model.dim, "intermediate_size": model.hidden, "num_hidden_layers": model.num_layers}
    ids = {"vocab_size": model.vocab_size, "bos_token_id": bos, "eos_token_id": bos}
    return {**sizes, **ids, "rms_norm_eps": NORM_EPS, "tie_word_embeddings": is_tied}


def _outer(model: Any) -> Weights:
    modules = {"model.embed_tokens": model.embedding, "model.norm": model.norm, "lm_head": model.head}
    return {f"{name}.weight": module.weight for name, module in modules.items()}


def _block(number: int, mlp: Any, others: dict[str, Any]) -> Weights:
    parts = {"mlp.gate_proj": mlp.gate, "mlp.up_proj": mlp.values, "mlp.down_proj": mlp.out, **others}
    return {f"model.layers.{number}.{name}.weight": module.weight for name, module in parts.items()}


def _by_head(heads: int, *parts: Tensor) -> Tensor:
    """Rows [heads * n_i, D] of several matrices as one, all rows of a head together."""
    return torch.cat([part.reshape(heads, -1, part.shape[1]) for part in parts], dim=1).flatten(0, 1)


def _save(config: Any, weights: Weights, directory: Path) -> None:
    model = package().AutoModelForCausalLM.from_config(config)
    # Raises unless they are exactly these tensors.
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    save(model, directory)
