"""Plans and timelines for people to look at."""
