"""Train many steps for each sync, with callbacks, checkpoints and every loss.

python examples/03_step_loop.py DIR
"""

import sys
import tempfile

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink

if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    torch.manual_seed(0)
    train = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1], train)
    loader = DataLoader(photos, batch_size=8, shuffle=True, num_workers=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.resnet18(num_classes=len(photos.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))

    loop = torch_sink.StepLoop(
        model,
        torch.nn.functional.cross_entropy,
        optimizer,
        scheduler=scheduler,
        schedule="step",  # stepped after each update; "epoch": at each epoch's end, as in most tutorials
        clip_grad_norm=1.0,
        steps_per_sync=100,  # steps per sync; shorter at the end of an epoch, or where a callback needs it
    )
    with tempfile.TemporaryDirectory() as folder, torch_sink.SinkLoader(loader) as batches:
        checkpoint = torch_sink.ModelCheckpoint(directory=folder)
        history = loop.run(batches, epochs=2, callbacks=[torch_sink.LossMonitor(), checkpoint])
        print(f"{history.steps} steps, {history.host_syncs} syncs, {history.samples_per_second:.0f} images/s")
        print(f"first loss {history.losses[0]:.3f}, last loss {history.losses[-1]:.3f}")
        print(loop.evaluate(batches, metrics={"accuracy"}))
        print(loop.explain())
        print(f"resumed at step {loop.resume(folder, batches)}")
