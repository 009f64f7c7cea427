"""What `holdfast rl export` does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.harness.training.command import configuration_of
from holdfast.rl.export.executorch import export_program
from holdfast.rl.export.saved_versions import SavedVersions
from holdfast.rl.export.version_evaluation import held_out_prompts
from holdfast.rl.export.weights import export_file, export_folder
from holdfast.rl.run.policy_source import task_of
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.trainers.training import weights_digest

Format = Literal["hf", "safetensors", "executorch"]

COMPARED_PROMPTS = 200
"""How many held-out prompts an exported program is compared with the model on, at most."""


def export_version(directory: Path, version: str, to: Format, out: Path) -> str:
    """Export a saved version of a run; returns what was written, in words."""
    config = configuration_of(directory, ())
    saved = SavedVersions(config, RunDirectory(directory))
    number = saved.find(version)
    said = f"version {number} of {directory} is in {out}"
    if to == "executorch":
        prompts = held_out_prompts(config, task_of(config), COMPARED_PROMPTS)
        with tempfile.TemporaryDirectory(prefix="holdfast-export-") as scratch:
            report = export_program(saved.source(number, Path(scratch) / "model"), prompts, config.sampling, out)
        return (
            f"{said}: {report.nbytes:,} bytes, exported in {coarse_seconds(report.seconds)}, {report.delegated:.0%} of "
            f"its nodes in XNNPACK; logits within {report.difference:.1e} of eager torch's (up to "
            f"{report.largest:.1f}; allowed {report.allowed:.1e}), {counted(len(prompts), 'held-out prompt')} answered "
            "as the model does"
        )
    model = saved.model(number)
    digest = weights_digest(model.state_dict())
    if to == "hf":
        export_folder(model, config.model.path, out)
    else:
        export_file(model, {"run": str(directory.absolute()), "version": str(number), "digest": digest}, out)
    return f"{said}; weights {digest[:16]}"
