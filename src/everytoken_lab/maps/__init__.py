"""Score maps for people: sheets, summaries, the released archives."""
