"""The arithmetic of policy gradients as kernels: torch's ops, Triton's and Helion's, chosen by device and size."""

from holdfast.rl.kernels.dispatch import policy_loss, token_logprobs
from holdfast.rl.kernels.loss_form import LossForm, LossInputs

__all__ = ["LossForm", "LossInputs", "policy_loss", "token_logprobs"]
