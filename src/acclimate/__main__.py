from acclimate.cli import main

main()
