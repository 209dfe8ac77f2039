"""Segmentation and detection."""
