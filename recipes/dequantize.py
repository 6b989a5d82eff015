"""Make a plain checkpoint of a quantised one, with transformers and the library of the checkpoint's method.

    python recipes/dequantize.py CHECKPOINT OUT [--dtype bfloat16] [--device cuda]

For methods that cannot be dequantised shard by shard while they are loaded (AQLM, HQQ, GPTQ with activation order, …).
Fine-grained FP8, MXFP4, other GPTQ, AWQ, and compressed-tensors of 8 bits, packed integers and NVFP4 need no such step.
The whole model is in memory; the method's library must be installed, and many methods need a GPU. Where transformers
cannot dequantise a method, each quantised linear layer tells its own weight: its outputs for the unit vectors.
"""

import argparse

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

STEP = 512  # unit vectors that a layer takes at a time


def plain_linear(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """The linear layer that computes what a quantised one does."""
    bias = getattr(layer, "bias", None)
    plain = nn.Linear(layer.in_features, layer.out_features, bias=bias is not None, dtype=dtype, device=device)
    if bias is not None:
        plain.bias.copy_(bias)
        bias.zero_()
    units = torch.eye(layer.in_features, dtype=dtype, device=device).split(STEP)
    plain.weight.copy_(torch.cat([layer(part) for part in units]).T)
    return plain


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="hub name or folder")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)

    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype, device_map={"": device})
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        raise SystemExit(f"{args.checkpoint} is not quantised, or was dequantised by transformers: nothing to do.")
    try:
        model = model.dequantize(dtype)
    except NotImplementedError:  # transformers cannot for this method, but its layers answer one by one
        for name, layer in list(model.named_modules()):
            if isinstance(getattr(layer, "in_features", None), int) and type(layer) is not nn.Linear:
                model.set_submodule(name, plain_linear(layer, dtype, device))
        quantizer.remove_quantization_config(model)
    made = getattr(model, "_weight_conversions", None) or []  # saving would revert the method's own, which it cannot
    of_method = [any(hasattr(op, "hf_quantizer") for op in getattr(each, "operations", ())) for each in made]
    model._weight_conversions = [each for each, is_own in zip(made, of_method, strict=True) if not is_own]
    model.to("cpu", dtype).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.checkpoint).save_pretrained(args.out)


if __name__ == "__main__":
    main()
