"""Outputs in other outputs of transformers are followed too: a loss may be made of any of their tensors."""

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.siglip.modeling_siglip import SiglipOutput

from hf_fsdp_tools.sharding.zero_grads import in_graph, with_tensor, with_zero_grads, with_zero_grads_for_any_loss


def _output():
    hidden = torch.ones(2, 3, requires_grad=True) * 2
    vision = BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden[:, 0], hidden_states=(hidden,))
    return SiglipOutput(logits_per_image=hidden.t(), vision_model_output=vision)


def test_a_loss_of_a_nested_output_reaches_the_weights():
    weight, output = torch.ones(4, requires_grad=True), _output()
    reached = with_zero_grads_for_any_loss(output, [weight])
    reached.vision_model_output.pooler_output.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(4))


def test_no_view_is_left_in_a_nested_output():
    output = _output()
    assert sum(tensor._is_view() for tensor in in_graph(output)) == 2
    for tensor in [*in_graph(output)]:
        if tensor._is_view():
            output = with_tensor(output, tensor, with_zero_grads(tensor))
    assert not any(tensor._is_view() for tensor in in_graph(output))
    assert output.vision_model_output.hidden_states[0] is output.vision_model_output.last_hidden_state
