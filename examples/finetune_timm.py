"""Fine-tune a timm model: timm's transforms and loader, pixels made on the device.

python examples/finetune_timm.py DIR      # needs: pip install timm
"""

import sys

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    dataset = create_dataset("", root=sys.argv[1], split="train", is_training=True)
    model = timm.create_model("resnet18", pretrained=False, num_classes=len(dataset.reader.class_to_idx))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve_data_config({"img_size": 64}, model=model)
    loader = create_loader(
        dataset,
        input_size=config["input_size"],
        batch_size=8,
        is_training=True,
        mean=config["mean"],
        std=config["std"],
        auto_augment="rand-m9-mstd0.5",
        num_workers=2,
        use_prefetcher=False,  # the prefetcher decodes in the workers; a SinkLoader prefetches on the device
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    loop = torch_sink.StepLoop(
        model, LabelSmoothingCrossEntropy(0.1), optimizer, amp="auto", ema=0.99, steps_per_sync=50
    )
    with torch_sink.SinkLoader(loader) as batches:
        history = loop.run(batches, epochs=2)
    print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}")
    print(f"averaged weights: {type(loop.ema_model()).__name__}")
    print(torch_sink.fallback_report())
