"""What objectives read: a batch with its placements, from our loader or from anybody's torchvision pipeline."""
