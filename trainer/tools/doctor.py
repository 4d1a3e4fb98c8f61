"""Checks of `train doctor` beside the contract: this node, and any causal model of `transformers` on disk."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.env import pick_backend, rank_info
from trainer.errors import UserError
from trainer.import_path import format_error
from trainer.lab.contracts.adapted import Adapted
from trainer.lab.contracts.subject import CallFailed
from trainer.lab.hugging_face import package, quiet, references_on_cpu
from trainer.wording import few

OTHER_MODEL = "name a causal model with an output layer"
SIZE = 2048  # of matrices of -1, 0 and 1: sums are exact in every precision that multiplies them
NUMBERS = 16_000_000


class NodeCheck:
    """Under torchrun a rank checks its device and the sum over ranks; alone, every device.

    `doing` says what is being tried: a broken device or network may never answer.
    """

    def __init__(self) -> None:
        self.doing = "looking for devices"
        self.lines: list[str] = []

    def run(self, seconds: float) -> str:
        """The problem of the node; empty: there is none, and `lines` say what works."""
        try:
            info = rank_info()
            expected = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
            found = torch.cuda.device_count()
            if found < expected:
                return f"{found} of {expected} devices are there"
            devices = [torch.device("cuda", number) for number in range(found)] or [torch.device("cpu")]
            if info.world_size > 1:
                devices = [devices[info.local_rank % len(devices)]]
            works = all(map(self._multiplies, devices))
            if works and info.world_size > 1:
                works = self._sums(devices[0], seconds)
        except RuntimeError as error:  # of CUDA or of a collective
            return f"{self.doing} fails: {str(error).splitlines()[0]}"
        return "" if works else f"{self.doing} is wrong"

    def _multiplies(self, device: torch.device) -> bool:
        self.doing = f"a matrix product on {device}"
        generator = torch.Generator().manual_seed(0)
        one, other = (torch.randint(-1, 2, (SIZE, SIZE), generator=generator).float() for _ in range(2))
        expected, here, there = one @ other, one.to(device), other.to(device)
        for _ in range(3):  # the first one loads the kernel
            began = time.perf_counter()
            if not torch.equal((here @ there).cpu(), expected):
                return False
            took = time.perf_counter() - began
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        speed = f"{2 * SIZE**3 / took / 1e12:.2g} TFLOP/s in float32, with the copy back"
        self.lines.append(f"{device} ({name}): {speed}")
        return True

    def _sums(self, device: torch.device, seconds: float) -> bool:
        self.doing = "a sum over all ranks"
        dist.init_process_group(pick_backend(device), timeout=timedelta(seconds=seconds))
        ranks = dist.get_world_size()
        for _ in range(2):  # the first one connects
            began = time.perf_counter()
            numbers = torch.full((NUMBERS,), dist.get_rank() + 1.0, device=device)
            dist.all_reduce(numbers)
            is_right = bool((numbers == ranks * (ranks + 1) / 2).all())
            took = time.perf_counter() - began
        dist.destroy_process_group()
        size = f"{NUMBERS * 4 / 1e6:.0f} MB"
        self.lines.append(f"all-reduce of {size} over {ranks} ranks: {took * 1e3:.0f} ms")
        return is_right


def load(folder: str) -> tuple[Adapted, int, str]:
    """A model for the checks, its number of token ids, and its name. Nothing is downloaded.

    Args:
        folder: a directory of `save_pretrained`.

    Raises:
        UserError: there is no such directory, it cannot be read, or the model takes no token ids.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = package()
    with quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = _read(transformers, folder)
            references_on_cpu(model)
            adapted = Adapted(model)
        except UserError:
            raise
        except CallFailed as error:
            problem = f"{folder} cannot be checked: {str(error)[:600]}"
            raise UserError("--hf", problem, OTHER_MODEL) from error
        except Exception as error:  # a damaged directory may raise anything
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            problem = f"{folder} cannot be checked: {format_error(cause)[:600]}"
            raise UserError("--hf", problem, "name another directory") from error
    config = model.config.get_text_config()
    parameters = sum(each.numel() for each in model.parameters())
    what = f"{type(model).__name__} of {parameters:,} parameters, in {model.dtype}"
    return adapted, config.vocab_size, what


def _read(transformers: Any, folder: str) -> Any:
    if not (Path(folder) / "config.json").is_file():
        fix = "name a directory that save_pretrained wrote"
        raise UserError("--hf", f"{folder} has no config.json", fix)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        problem = f"{folder} has no weights for {few(missing)}, which would be drawn at random"
        raise UserError("--hf", problem, "save the whole model, with the class that its config names")
    return model
