"""What stages of earlier versions of torch had, and some programs still call."""

from __future__ import annotations

from typing import Any

import torch

from taktline.compat.torch_pipelining import _utils as utils
from taktline.compat.torch_pipelining._metadata import HAS_META, preparing


class Earlier:
    """Methods of stages; where torch still has one, it comes first."""

    _stage_meta: Any
    stage_index: int

    def get_outputs_meta(self) -> tuple[Any, ...]:
        """Shapes and types of the outputs."""
        if self._stage_meta.outputs is None:
            raise utils.PipeliningMetadataError(
                f"Stage {self.stage_index}: outputs metadata required for recv info."
            )
        return self._stage_meta.outputs

    def _configure_outputs_meta(self, outputs_meta: tuple[torch.Tensor, ...]) -> None:
        """Set the metadata of the outputs."""
        self._stage_meta.outputs = utils.extract_tensor_metas(outputs_meta)

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Run the module once, to find the metadata of its outputs."""
        with preparing([self]):
            self._forward_metadata_inference(args, kwargs)  # pyright: ignore
        return self.get_outputs_meta()

    def _create_act_recv_info(self) -> tuple[Any, ...]:
        """The source of each input."""
        stage: Any = self
        if HAS_META:
            stage._setup_forward_recv_info(1, False)
        else:
            stage._prepare_forward_infra(1, ())
        return stage.args_recv_info[0]

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        """The stages that each output goes to."""
        stage: Any = self
        if HAS_META:
            stage._setup_forward_send_info()
        else:
            stage._prepare_forward_infra(1, ())
        return stage.act_send_info

    def _validate_fwd_input(self, args: tuple[Any, ...], kwargs: Any) -> None:
        """Raise unless a micro-batch's arguments are like those of the first one."""
        desc = f"Stage {self.stage_index} forward inputs"
        self._validate_stage_tensors(desc, self._stage_meta.inputs, tuple(args))  # pyright: ignore

    def _validate_fwd_outputs(self, outputs: tuple[Any, ...]) -> None:
        """Raise unless a micro-batch's outputs are like those of the first one."""
        desc = f"Stage {self.stage_index} forward outputs"
        self._validate_stage_tensors(desc, self._stage_meta.outputs, outputs)  # pyright: ignore
