"""PyTorch Lightning: the Trainer is unchanged, its loader is wrapped.

python examples/lightning_module.py DIR      # needs: pip install lightning
"""

import sys

import lightning
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import torch_sink


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = models.resnet18(num_classes=classes)

    def training_step(self, batch, number):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch_sink.set_image_backend("device")
    lightning.seed_everything(0)
    train = transforms.Compose([transforms.RandomResizedCrop(64), transforms.ToTensor()])
    photos = datasets.ImageFolder(sys.argv[1], train)
    loader = torch_sink.SinkLoader(DataLoader(photos, batch_size=8, shuffle=True, num_workers=2))
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(Classifier(len(photos.classes)), loader)
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")
    print(torch_sink.fallback_report())
    loader.close()
