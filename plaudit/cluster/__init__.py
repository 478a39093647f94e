"""The processes of a run: started, joined, watched, stopped."""
