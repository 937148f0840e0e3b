"""metabayfl methods, check, cost: look before training."""

import argparse
import json

from metabayfl.commands.terminal import console
from metabayfl.cost import estimate, estimate_table, parse_link, read_device
from metabayfl.inspection import check as check_module
from metabayfl.listing import method_table, options_table
from metabayfl.models import load_model


def methods(options: argparse.Namespace) -> int:
    """List the methods, or the options of one."""
    console().print(options_table(options.name) if options.name else method_table())
    return 0


def check(options: argparse.Namespace) -> int:
    """Say whether a model can be federated and made Bayesian."""
    report = check_module(load_model(options.model))
    print(f"{options.model} {report}")
    return 0 if report.ok else 1


def cost(options: argparse.Namespace) -> int:
    """Estimate the costs of every method."""
    found = estimate(options.settings, read_device(options.device), parse_link(options.link))
    if options.json:
        print(json.dumps(found.model_dump()))
    else:
        console().print(estimate_table(found))
    return 0
