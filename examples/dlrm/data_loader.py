from train import trainer  # a cluster runs this file as its data loaders

trainer.load()
