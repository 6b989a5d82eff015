"""torch 2.13 on CPUs with AMX: in bf16, gradients of those weights of a convolution that see padding alone are whatever
was in memory. Convolutions of 3 × 3 over images of one pixel, as in Grounding DINO, have such weights."""

import torch

conv = torch.nn.Conv2d(192, 64, 3, stride=2, padding=1).bfloat16()
image = torch.randn(2, 192, 1, 1).bfloat16()
largest = 0.0
for _ in range(50):
    used = [torch.full((192 * 64 * 9,), 3e20).bfloat16() for _ in range(20)]
    del used  # the next gradient may get this memory
    conv.zero_grad()
    conv(image).float().sum().backward()
    gradient = conv.weight.grad.float()
    gradient[:, :, 1, 1] = 0  # the middle is what sees the pixel
    largest = max(largest, float(gradient.abs().nan_to_num(torch.inf).max()))
print("the gradient of weights that see padding alone:", largest, "and not 0.0")
