"""ATIF, the trajectory format of the Harbor framework.

reader.py   trajectories -> saved episodes
writer.py   saved episodes -> trajectories
"""
