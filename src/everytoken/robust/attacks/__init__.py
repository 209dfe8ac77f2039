"""Adversarial attacks inside a ball: FGSM, PGD, and AutoAttack's four with their ensemble.

All attacks take images in 0..1 and a model from such images to logits (normalisation inside), and look for an image
within distance eps, again in 0..1, that the model gets wrong. Randomness is keyed by image, attack and restart, so what
happens to an image does not depend on its batch.
"""
