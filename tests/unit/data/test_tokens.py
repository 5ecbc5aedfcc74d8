"""The tokens of a pack travel with its states as two tensors that can be sent."""

import torch

from trials.data.tokens import PackTokens, pack, unpack


def test_states_with_the_strides_of_a_convolution_can_be_sent() -> None:
    tokens = PackTokens(
        input_ids=torch.arange(3),
        positions=torch.arange(3)[None],
        lengths=(3,),
        grids=torch.zeros((0, 0), dtype=torch.int64),
    )
    states = torch.randn(2, 5, 4).transpose(1, 2)
    floats, integers = pack((states,), tokens)
    assert floats.is_contiguous()
    assert integers.is_contiguous()
    (found,), _ = unpack(floats, integers)
    assert torch.equal(found, states)
