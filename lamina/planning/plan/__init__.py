"""Estimates how long slices and attention take on given hardware, and finds the pools that serve a model best.

``hardware`` is the catalogue, ``model_shapes`` has the sizes of models, ``kernel_times`` and ``cost`` are the cost
model, ``fit_store`` keeps its fits, ``serving`` and ``planner`` search. Nothing here runs a model or imports torch.

The cheapest way to serve Llama-3-8B on up to two H100 and two H20 under the default SLOs:

>>> from lamina.planning.plan import hardware, model_shapes, prices, workload
>>> from lamina.planning.plan.cost import CostModel, Fits
>>> from lamina.planning.plan.serving import Server
>>> from lamina.planning.plan.ways import Slo, ways
>>> shape, catalogue = model_shapes.find("Llama-3-8B"), hardware.load(None)
>>> pools = catalogue.pool("h100:2", 2), catalogue.pool("h20:2", 2)
>>> costs = {one.kind: CostModel(shape, one, Fits.load(one, None)) for pool in pools for one, _ in pool}
>>> server = Server(shape, workload.of_lengths(1155, 211), costs, prices.load("own"), Slo())
>>> found = [capacity for way in ways(shape, *pools) if (capacity := server.evaluate(way)) is not None]
>>> min(found, key=lambda capacity: capacity.usd_per_request).way.describe()
'h100:2 with local memory, 2 x TP1'
"""
