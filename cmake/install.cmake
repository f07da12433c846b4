# cmake --install: the four programs, which find each other in one folder, and what an operator wants
# beside them. What they load is in deploy/install_deps.sh --runtime.
include(GNUInstallDirs)
install(TARGETS zeroshard zeroshard-coordinator zeroshard-worker zeroshard-store
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Of deploy/, what is read and not run from a checkout; folders that are not there are left out.
foreach(folder jobs kubernetes prometheus grafana)
  install(DIRECTORY deploy/${folder} DESTINATION ${CMAKE_INSTALL_DATADIR}/zeroshard
    OPTIONAL PATTERN tests EXCLUDE)
endforeach()
