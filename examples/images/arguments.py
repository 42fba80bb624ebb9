"""Shared arguments of the image scripts."""

from command_line import natural, positive


def parse_images(parser, argv, steps, layers, out):
    """Adds arguments for images, models, training and plots; returns the parsed ones.

    Args:
        parser: A `Parser` with the script's own arguments.
        argv: The command line.
        steps, layers, out: Defaults.
    """
    add = parser.add_argument
    add("--size", type=positive, default=16, help="rows and columns of a patch")
    add("--levels", type=positive, default=32, help="levels of brightness, up to 256")
    parser.add_model_size(dim=64, heads=4, layers=layers)
    parser.add_training(steps=steps, batch=16, learning_rate=3e-3, rows="images")
    add("--test-images", type=positive, default=200, help="at most")
    add("--samples", type=natural, default=8, help="of each kind; 0 writes none")
    parser.add_out(out, "the PNGs")
    parser.add_seeds()
    parser.add_verbose()
    parser.add_save()
    arguments = parser.parse_args(argv)
    if not 2 <= arguments.levels <= 256:
        parser.error(f"--levels must be 2 to 256; received {arguments.levels}")
    return arguments
