"""Plans before anything runs: cost model, planner, simulator, measurements."""
