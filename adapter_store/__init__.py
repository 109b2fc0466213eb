"""S3 or a folder -> host memory -> a slot on the device: where LoRA adapters come from and where
they live."""
