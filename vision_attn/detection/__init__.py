"""What a detector needs beside its model: boxes, matching, losses, denoising queries, detections, average precision."""
