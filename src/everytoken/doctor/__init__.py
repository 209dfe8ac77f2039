"""Find trouble before training does: in images, score maps, runs and the machine. Each finding says what to do."""
