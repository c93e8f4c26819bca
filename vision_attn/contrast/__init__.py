"""Studies that compare how models overfit: a grid of trainings, what they measure, statistics and a report."""
