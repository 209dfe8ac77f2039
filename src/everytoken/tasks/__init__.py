"""Trained backbones on dense tasks: segmentation and detection."""
