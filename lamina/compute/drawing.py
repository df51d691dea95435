"""Draws one token per row with noise that belongs to the token: the Gumbel-max trick.

The token with the largest logit / temperature + noise is drawn, which has the probabilities of the softmax. The noise
is a hash of the row's key and the token id. So a small error in the logits, from another batch or another order of
sums, leaves every draw as it was unless the two best tokens are as close as the error: drawing from cumulative
probabilities instead would move the borders of all tokens.
"""

import torch
from torch import Tensor

from lamina import _native
from lamina.kernels.gpu.expert_product import ELEMENTS
from lamina.kernels.gpu.specialize import draw_program
from lamina.lowering.native_operators import ELEMENT_TYPES, PATH


def draw(
    logits: Tensor, places: Tensor, highest: Tensor, least: Tensor, temperature: Tensor, keys: Tensor, tokens: Tensor
) -> None:
    """Draw from rows ``places`` [R], int64, of ``logits`` [*, V], any float dtype. All tensors are on one device.

    Args:
        highest: The largest logit of each row, float32 [R]; finite.
        least: Tokens with a lower logit are not drawn, float32 [R]; at most ``highest``.
        temperature: Positive, float32 [R].
        keys: What the noise of each row depends on, int64 [R].
        tokens: The first token with the largest logit, int64 [R], contiguous; replaced by the token drawn.
    """
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rows, width, stride = len(places), logits.shape[1], logits.stride(0)
    if logits.device.type == "cpu":
        _native.draw(
            ELEMENT_TYPES[logits.dtype],
            logits.data_ptr(),
            stride,
            places.data_ptr(),
            highest.data_ptr(),
            least.data_ptr(),
            temperature.data_ptr(),
            keys.data_ptr(),
            tokens.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
            PATH,
        )
        return
    from lamina.kernels.gpu import triton_draw  # needs Triton

    program = draw_program(ELEMENTS[logits.dtype])
    arrays = (places, highest, least, temperature, keys, tokens)
    triton_draw.draw[(rows,)](logits, stride, *arrays, width, **dict(program.constants), num_warps=program.warps)
